// The last quarter of an hour as lines, drawn by uPlot. Colours come from the style sheet, which defines the themes.
import { duration, number, percent } from "./numbers.js";

const LONGEST_SECONDS = 900;
const SHORTEST_SECONDS = 60;
const HEIGHT = 160;
const SHARES = ["p50", "p95", "p99"];
const latencies = (name) => SHARES.map((label, i) => ({ label, colour: [1, 2, 4][i], read: (point) => point[name][i] }));

// colour: the number of a --draft-N, 0 for tokens that were not drafted. top: the least maximum of the axis. isStacked: the
// lines are shares, each of which is drawn on top of those before.
export const CHARTS = [
  {
    title: "Tokens per second", unit: "all streams", format: (v) => number(v), top: 1,
    series: () => [{ label: "generated", colour: 2, isFilled: true, read: (point) => point.tokens_per_second }],
  },
  {
    title: "Acceptance by position", unit: "share of drafts", format: (v) => percent(v), top: 1,
    series: (depth) => Array.from({ length: depth }, (_, i) => ({
      label: `draft ${i + 1}`, colour: i + 1, read: (point) => point.acceptance_per_position[i] ?? null,
    })),
  },
  {
    title: "Tokens a round", unit: "1 without drafts", format: (v) => number(v, 2), top: 2,
    series: () => [
      { label: "tokens", colour: 3, isFilled: true, read: (point) => point.acceptance_length },
      { label: "drafts", colour: 6, read: (point) => point.depth },
    ],
  },
  {
    title: "Depth chosen", unit: "share of rounds", format: (v) => percent(v), top: 1, isStacked: true,
    series: (depth) => Array.from({ length: depth + 1 }, (_, i) => ({
      label: i === 1 ? "1 draft" : `${i || "no"} drafts`, colour: i, isFilled: true,
      read: ({ depth_shares: shares }) => (shares.length ? shares[i] ?? 0 : null),
    })),
  },
  {
    title: "Requests", unit: "", format: (v) => number(v), top: 2,
    series: () => [
      { label: "running", colour: 1, isFilled: true, read: (point) => point.num_running },
      { label: "waiting", colour: 6, read: (point) => point.num_waiting },
    ],
  },
  {
    title: "KV cache in use", unit: "share of blocks", format: (v) => percent(v), top: 0.1,
    series: () => [{ label: "used", colour: 4, isFilled: true, read: (point) => point.kv_cache_usage_ratio }],
  },
  { title: "Time to first token", unit: "", format: duration, top: 0.01, series: () => latencies("time_to_first_token") },
  { title: "Time per output token", unit: "", format: duration, top: 0.001, series: () => latencies("time_per_output_token") },
  { title: "Gap between pieces", unit: "", format: duration, top: 0.001, series: () => latencies("chunk_gap") },
];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB"); // 18:05:30
// A server that has just started fills the width from its first minute on.
const span = (low, high) => Math.min(LONGEST_SECONDS, Math.max(SHORTEST_SECONDS, high - low));

export class Charts {
  constructor(container, charts, height = HEIGHT) {
    this.charts = charts;
    this.height = height;
    this.plots = [];
    this.depth = null;
    this.points = [];
    this.boxes = charts.map((chart) => {
      const box = container.appendChild(document.createElement("figure"));
      box.className = "chart";
      box.style.margin = 0;
      const title = box.appendChild(document.createElement("h3"));
      title.textContent = `${chart.title} `;
      title.appendChild(document.createElement("small")).textContent = chart.unit;
      return box;
    });
    new ResizeObserver(() => this.resize()).observe(container);
  }

  show(points, depth) {
    this.points = points;
    if (depth !== this.depth) {
      this.depth = depth;
      this.recolour();
    }
    this.plots.forEach((plot, i) => {
      plot.setData(this.#data(this.charts[i]));
      showNewest(plot);
    });
  }

  // A canvas does not follow the style sheet: a new theme, or a new depth, makes new plots.
  recolour() {
    if (this.depth === null) return;
    this.plots.forEach((plot) => plot.destroy());
    this.plots = this.charts.map((chart, i) => new uPlot(this.#options(chart, this.boxes[i]), this.#data(chart), this.boxes[i]));
    this.plots.forEach(showNewest);
  }

  resize() {
    this.plots.forEach((plot, i) => plot.setSize({ width: inner(this.boxes[i]), height: this.height }));
    this.plots.forEach(showNewest);
  }

  #data(chart) {
    const columns = chart.series(this.depth).map((line) => this.points.map((point) => line.read(point)));
    if (chart.isStacked) columns.slice(1).forEach((column, i) => column.forEach((value, at) => (column[at] = value == null ? null : value + columns[i][at])));
    return [this.points.map((point) => point.time_unix), ...columns];
  }

  #options(chart, box) {
    const lines = chart.series(this.depth);
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      width: inner(box),
      height: this.height,
      cursor: { sync: { key: "headway" }, points: { size: 6 }, drag: { x: false, y: false } },
      scales: {
        x: { time: true, range: (plot, low, high) => [high - span(low, high), high] },
        y: { range: (plot, low, high) => [0, Math.max(chart.top, (high ?? 0) * 1.08)] },
      },
      axes: [
        {
          ...axis, size: 26, space: 70,
          values: (plot, ticks, index, space, step) => ticks.map((tick) => clock(tick).slice(0, step < 60 ? 8 : 5)),
        },
        { ...axis, size: 56, space: 34, values: (plot, ticks) => ticks.map(chart.format) },
      ],
      bands: chart.isStacked ? lines.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
      series: [
        { value: (plot, seconds) => (seconds == null ? "" : clock(seconds)), label: "at" },
        ...lines.map((line) => {
          const colour = style(line.colour ? `--draft-${line.colour}` : "--quiet");
          return {
            label: line.label,
            stroke: colour,
            width: 1.75,
            fill: line.isFilled ? `${colour}${chart.isStacked ? "80" : "26"}` : undefined,
            spanGaps: false,
            points: { show: false },
            value: (plot, value, series, at) => chart.format(at in this.points ? line.read(this.points[at]) : null),
          };
        }),
      ],
    };
  }
}

// The legend shows the newest values unless the cursor points at others.
function showNewest(plot) {
  if (plot.cursor.left == null || plot.cursor.left < 0) plot.setLegend({ idx: plot.data[0].length - 1 });
}

function inner(box) {
  const { paddingLeft, paddingRight } = getComputedStyle(box);
  return box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}
