// The live page: asks for new points each second and hands them to tiles and charts; the prompt box and the chat are separate.
import { CHARTS, Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { SpeedUp } from "./speedup.js";
import { Tiles } from "./tiles.js";
import { Playground } from "./playground.js";
import { authorized, hasKey, setKey } from "./key.js";
import { Views } from "./views.js";

const POLL_MILLISECONDS = 1000;
const KEPT_SECONDS = 900;
const THEMES = ["system", "light", "dark"];

const $ = (id) => document.getElementById(id);
const charts = new Charts($("charts"), CHARTS);
const speedup = new SpeedUp({ value: $("speedup-value"), note: $("speedup-note"), chart: $("speedup-chart") });
const tiles = new Tiles($("tiles"));
const playground = new Playground();
const chat = new Chat();
const views = new Views();
let points = [];
let parameters = null; // the fields that the model takes; null until they are known

async function poll() {
  try {
    const after = points.length ? points.at(-1).time_unix : 0;
    const answer = await fetch(`dashboard/data?after=${after}`, authorized());
    $("key-form").hidden = answer.status !== 401;
    if (answer.status === 401) askForKey();
    else if (answer.ok) await show(await answer.json());
    else showState("unreachable");
  } catch {
    showState("unreachable");
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

async function show({ server, fields, points: rows, audits }) {
  showState(server.state);
  $("server").textContent = [server.model, server.device, server.dtype, `version ${server.version}`].filter(Boolean).join(" · ");
  document.title = `Headway · ${server.model}`;
  for (const row of rows) points.push(Object.fromEntries(fields.map((name, i) => [name, row[i]])));
  const newest = points.at(-1);
  if (newest) points = points.filter((point) => point.time_unix > newest.time_unix - KEPT_SECONDS);
  if (!parameters && server.can_chat && server.device) parameters = await parametersOf(server.model);
  playground.setServer(server);
  chat.setServer(server, parameters);
  views.setServer(server);
  tiles.show(newest, server, audits);
  speedup.show(points, server);
  // Rounds before an operator's limit were deeper.
  charts.show(points, points.reduce((depth, point) => Math.max(depth, point.depth_shares.length - 1), server.depth ?? 0));
}

async function parametersOf(model) {
  const answer = await fetch(`v1/models/${model.split("/").map(encodeURIComponent).join("/")}`, authorized());
  return answer.ok ? (await answer.json()).supported_parameters : null;
}

function askForKey() {
  showState(hasKey() ? "wrong key" : "needs a key");
  $("key-label").textContent = hasKey() ? "This server refused the key; try another" : "This server wants an API key";
}

function showState(state) {
  $("state").textContent = state;
  $("state").dataset.state = state;
}

// --- the theme: as the system has it until a click says otherwise ---
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(choice) {
  const isDark = choice === "dark" || (choice === "system" && systemIsDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = `theme: ${choice}`;
  charts.recolour();
  speedup.recolour();
}

const theme = () => localStorage.getItem("headway-theme") ?? "system";
$("theme").addEventListener("click", () => {
  localStorage.setItem("headway-theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  applyTheme(theme());
});
systemIsDark.addEventListener("change", () => applyTheme(theme()));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key-form").hidden = true;
});
applyTheme(theme());
poll();
