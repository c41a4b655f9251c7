// Copies a text. Browsers have a clipboard API only for pages of this machine and of HTTPS; elsewhere the older command works.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.body.appendChild(document.createElement("textarea"));
  const focused = document.activeElement;
  box.className = "unseen";
  box.value = text;
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!isDone) throw new Error("the browser did not allow it");
}
