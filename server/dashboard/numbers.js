// Numbers as people read them; a missing measurement is a dash.
const DASH = "–";

export function number(value, digits = 0) {
  if (value == null) return DASH;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(value, digits = 0) {
  return value == null ? DASH : `${number(100 * value, digits)} %`;
}

export function times(value) {
  return value == null ? DASH : `${number(value, 2)}×`;
}

export function duration(seconds) {
  if (seconds == null) return DASH;
  if (seconds === 0) return "0";
  if (seconds < 0.01) return `${number(1000 * seconds, 1)} ms`;
  return seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds, seconds < 10 ? 2 : 1)} s`;
}
