// The page: asks for the view once a second, and hands its parts to what draws them.

import { bytes, chart, clock, percent } from "./charts.js";
import { $, el, histogram, legend, placement, put, table } from "./dom.js";
import { KINDS, STATES, lanes, squares } from "./lanes.js";

const SCHEMA = 1;
const EVERY_MS = 1000;
const PATIENCE_MS = 10000;  // a tunnel that is gone says nothing

const WORKER = [
  ["task", "worker", "left"], ["state", "state", "left"], ["rate", "closures/s"], ["mean", "per closure"],
  ["stale", "staleness"], ["dropped", "dropped"], ["losses", "lost"], ["closure", "runs", "left long"],
  ["since", "for"], ["error", "last error", "left long"],
];
const PS = [
  ["task", "ps", "left"], ["state", "state", "left"], ["variables", "variables"], ["slots", "slots"],
  ["pushes", "pushes/s"], ["pulls", "pulls/s"], ["in", "in"], ["out", "out"], ["queue", "queue"],
  ["duplicates", "sent again"], ["backup", "backup", "left"],
];

// A report has all that can be asked for in the page: moments of the run, and the charts of the whole run.
const RECORDED = JSON.parse($("report")?.textContent ?? "null");

const asked = { span: RECORDED ? "run" : "recent", time: null, count: 0 };
let view = null;
let draw = null;

const lines = (series, names, label = (name) => name, shade = (_, at) => `c${at % 12}`) => names
  .filter((name) => series[name])
  .map((name, at) => ({ label: label(name), shade: shade(name, at), values: series[name] }));
const named = (series, prefix) => Object.keys(series).filter((name) => name.startsWith(prefix));

function makeCharts() {
  return {
    throughput: chart("throughput"),
    loss: chart("loss"),
    work: chart("work"),
    traffic: chart("traffic"),
    lanes: lanes("lanes"),
    squares: squares("states"),
  };
}

function showCharts({ series }) {
  const { time: times } = series;
  const [closures, steps] = lines(series, ["closures", "steps"], (name) => `${name}/s`);
  steps.scale = "right";  // often so many fewer that they would lie on the axis
  draw.throughput(times, [closures, steps]);
  draw.loss(times, lines(series, named(series, "reported "), (name) => name.slice(9)));
  const isKnown = Boolean(series.compute);
  const names = isKnown ? [...KINDS, "free"] : ["busy", "waiting", "idle", "gone"];
  const label = (name) => ({ free: "nothing to do", gone: "not here" })[name] ?? name;
  draw.work(times, lines(series, names, label, (name) => name), isKnown ? { stack: true, format: percent, top: 100 } : { stack: true });
  const traffic = [...named(series, "out "), ...named(series, "in ")];
  draw.traffic(times, lines(series, traffic, (name) => name.replace(/^(\w+) (.*)/, "$2 $1")), { format: bytes });
}

function showWorkers({ workers, num_workers: total, lanes: { times, rows }, states }) {
  const some = workers.length < total;
  const note = some ? `${workers.length} of ${total.toLocaleString()}: those in trouble, then the slowest` : "";
  $("lanes-note").textContent = note;
  $("workers-note").textContent = note;
  draw.lanes(workers.map((worker) => worker.task), times, rows);
  legend("lanes-legend", [...KINDS.map((kind) => [kind, kind]), ["nothing to do", "free"], ["not here", "gone"]]);
  $("states-card").hidden = !some;
  if (some) {
    legend("states-legend", [["busy (stronger: slower)", "busy"], ["waiting", "waiting"], ["idle", "idle"], ["not here", "gone"]]);
    draw.squares(states);
  }
  table("workers", WORKER, workers);
}

function show() {
  document.title = `${view.program} · psync`;
  $("program").textContent = view.program;
  $("state").textContent = view.state;
  $("state").className = `pill ${view.state}`;
  const log = view.mode === "log";
  $("uptime").textContent = `process ${view.pid}, up ${view.uptime}${log ? ", from its log" : ""}`;
  $("travel").hidden = !log;
  if (log) {
    Object.assign($("slider"), { min: view.moments.first, max: view.moments.last });
    if (asked.time === null) $("slider").value = view.moments.last;
    $("moment").textContent = new Date(view.time * 1000).toLocaleString([], { hour12: false });
  }
  put("why", ...view.why.map(({ level, text }) => el("li", { class: level }, text)));
  put("tiles", ...view.tiles.map((tile) => el("div", {},
    el("span", {}, tile.name), el("b", {}, tile.value), el("span", {}, tile.more))));
  for (const empty of document.querySelectorAll("[data-missing]")) {
    empty.textContent = view.missing[empty.dataset.missing] ?? "";
  }
  draw ??= makeCharts();
  showCharts(view);
  showWorkers(view);
  table("ps", PS, view.ps);
  placement("placement", view.placement);
  histogram("staleness", view.staleness);
  put("groups", ...view.groups.flatMap((group) =>
    [el("dt", {}, group.name), el("dd", {}, group.text), el("dd", {}, group.more)]));
  put("events", ...view.events.map((event) => el("li", { class: event.kind },
    el("span", {}, `${event.ago} ago`), el("b", {}, event.kind), el("span", {}, event.text))));
  put("notes", ...view.notes.map((note) => el("li", {}, note)));
}

function complain(text) {
  $("alert").hidden = !text;
  $("alert").textContent = text;
  document.querySelector("main").classList.toggle("stale", Boolean(text));
}

/** The view, or a text that says why there is none. */
async function answered(query) {
  try {
    const answer = await fetch(`api/view?${query}`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const text = (await answer.text()).trim();
    return answer.ok ? JSON.parse(text) : text;
  } catch {
    return "The program does not answer: it has ended, or is busy.";
  }
}

function recorded() {
  const { moments, series } = RECORDED;
  const after = asked.time === null ? -1 : moments.findIndex((moment) => moment.time > asked.time);
  const moment = after < 0 ? moments.at(-1) : moments[Math.max(0, after - 1)];
  return asked.span === "run" ? { ...moment, series } : moment;
}

async function refresh() {
  const number = asked.count += 1;
  const got = RECORDED ? recorded() : await answered(`span=${asked.span}${asked.time === null ? "" : `&time=${asked.time}`}`);
  if (number !== asked.count) return;  // something else was asked for meanwhile
  if (typeof got === "string") return complain(view ? `${got} This page shows ${clock(view.time)}.` : got);
  if (got.schema === undefined) return complain("Waiting for the first status.");
  if (got.schema !== SCHEMA) return location.reload();
  view = got;
  complain("");
  show();
}

async function follow() {
  try {
    if (!document.hidden && view?.mode !== "log") await refresh();
  } finally {
    setTimeout(follow, EVERY_MS);
  }
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.setAttribute("aria-pressed", button.dataset.span === asked.span);
  button.addEventListener("click", () => {
    asked.span = button.dataset.span;
    for (const each of document.querySelectorAll("[data-span]")) each.setAttribute("aria-pressed", each === button);
    refresh();
  });
}
$("slider").addEventListener("change", (event) => { asked.time = Number(event.target.value); refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && show());
document.addEventListener("visibilitychange", () => document.hidden || view?.mode === "log" || refresh());
addEventListener("resize", () => view && showWorkers(view));
follow();
