"use strict";
// Asks for runs, curves and seconds every few seconds while the page is looked at. What is shown stands behind
// the # of the address, so that it can be kept.

const EVERY_MS = 5000;
const FIRST = ["rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm",
  "train/entropy_loss", "train/train_rollout_logprob_abs_diff", "perf/step_time"];
const COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"];
const element = (id) => document.getElementById(id);
const color = (index) => COLORS[index % COLORS.length];

let runs = [];
let chosen = null; // names of metrics, in the order of the page; null until runs are known
let hidden = new Set(); // names of runs
const charts = new Map(); // metric -> {figure, plot, drawn}

function make(tag, text, more = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, more);
}

function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 100000) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds)), parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => whole >= size);
  if (at < 0) return "0 s";
  const [size, unit] = parts[at], rest = parts[at + 1];
  const more = rest ? Math.floor((whole % size) / rest[0]) : 0;
  return `${Math.floor(whole / size)} ${unit}` + (more ? ` ${more} ${rest[1]}` : "");
}

async function ask(path) {
  const answer = await fetch(`api/${path}`);
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

function metricsOfAll() {
  const found = new Map();
  for (const run of runs) for (const [name, { axis, last }] of Object.entries(run.metrics)) {
    if (!found.has(name)) found.set(name, { axis, last });
  }
  return new Map([...found].sort(([a], [b]) => (a < b ? -1 : 1)));
}

function readAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  if (kept.has("m")) chosen = kept.get("m").split(",").filter(Boolean);
  hidden = new Set((kept.get("without") || "").split(",").filter(Boolean));
}

function writeAddress() {
  const kept = new URLSearchParams({ m: chosen.join(",") });
  if (hidden.size) kept.set("without", [...hidden].join(","));
  history.replaceState(null, "", `#${kept}`);
}

function showRuns() {
  element("runs").replaceChildren(...runs.map((run, index) => {
    const label = make("label"), box = make("input", undefined, { type: "checkbox", checked: !hidden.has(run.name) });
    box.onchange = () => { box.checked ? hidden.delete(run.name) : hidden.add(run.name); writeAddress(); draw(); };
    const swatch = make("span", undefined, { className: "swatch" });
    swatch.style.background = color(index);
    const steps = run.ends.rollout !== undefined ? `step ${run.ends.rollout}` : "no step yet";
    const age = run.wrote ? `, ${duration(run.wrote - run.began)}, wrote ${duration(Date.now() / 1000 - run.wrote)} ago` : "";
    label.append(box, swatch, make("span", `${run.name}: ${steps}${age}`));
    if (run.problem) label.append(make("span", run.problem, { className: "problem" }));
    return label;
  }));
}

function showMetrics() {
  const wanted = element("filter").value.toLowerCase().split(/\s+/);
  const rows = [];
  for (const [name, { last }] of metricsOfAll()) {
    if (!wanted.every((word) => name.toLowerCase().includes(word))) continue;
    const button = make("button", undefined, { type: "button" });
    button.setAttribute("aria-pressed", chosen.includes(name));
    button.append(make("span", name.replace(/[/_]/g, "$&\u200b")), make("span", short(last), { className: "value" }));
    button.onclick = () => choose(name);
    const row = make("li");
    row.append(button);
    rows.push(row);
  }
  element("metrics").replaceChildren(...rows);
}

function choose(name) {
  chosen = chosen.includes(name) ? chosen.filter((other) => other !== name) : [name, ...chosen];
  writeAddress();
  showMetrics();
  draw();
}

function joined(curves, names) {
  const steps = [...new Set(names.flatMap((name) => curves[name].map(([step]) => step)))].sort((a, b) => a - b);
  const columns = names.map((name) => {
    const values = new Map(curves[name]);
    return steps.map((step) => (values.has(step) ? values.get(step) : undefined)); // null is a gap, undefined none
  });
  return [steps, ...columns];
}

function plotOf(metric, figure, names) {
  const text = getComputedStyle(document.body).color, grid = { stroke: "#8883", width: 1 };
  const axis = { stroke: text, grid, ticks: grid };
  const series = names.map((name) => ({
    label: name, stroke: color(runs.findIndex((run) => run.name === name)), width: 1.5, spanGaps: false,
    value: (_, value) => short(value), points: { size: 4 },
  }));
  return new uPlot({
    width: figure.clientWidth - 18, height: 220, scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 64, values: (_, ticks) => ticks.map(short) }],
    cursor: { sync: { key: "step" } }, series: [{ label: "step" }, ...series],
  }, [[], ...names.map(() => [])], figure);
}

function figureOf(metric) {
  const figure = make("figure");
  figure.append(make("h2", metric));
  return figure;
}

async function draw() {
  const names = runs.map((run) => run.name).filter((name) => !hidden.has(name)), drawn = names.join("\n");
  for (const [metric, { figure, plot }] of charts) if (!chosen.includes(metric)) {
    plot?.destroy();
    figure.remove();
    charts.delete(metric);
  }
  for (const metric of chosen) if (!charts.has(metric)) charts.set(metric, { figure: figureOf(metric) });
  element("charts").append(...chosen.map((metric) => charts.get(metric).figure));
  await Promise.all(chosen.map(async (metric) => {
    const curves = await ask(`curves?metric=${encodeURIComponent(metric)}`), chart = charts.get(metric);
    if (!chart) return; // it was closed meanwhile
    const there = names.filter((name) => curves[name]);
    if (chart.drawn !== drawn) {
      chart.plot?.destroy();
      chart.plot = plotOf(metric, chart.figure, there);
      chart.drawn = drawn;
    }
    chart.plot.setData(joined(curves, there));
  }));
}

async function showSeconds() {
  const found = await ask("seconds"), parts = [];
  for (const run of runs) if (!hidden.has(run.name)) {
    const { step, ...rest } = found[run.name];
    if (!step) continue;
    const rows = Object.entries(rest).sort(([, a], [, b]) => b - a);
    const table = make("table");
    rows.forEach(([name, seconds], index) => {
      const bar = make("div", undefined, { className: "bar" }), share = (100 * seconds) / step;
      bar.style.cssText = `width:${Math.min(100, share)}%;background:${color(index)}`;
      const row = table.insertRow();
      row.append(make("td", name), make("td", `${short(seconds)} s`), make("td", `${Math.round(share)} %`), make("td"));
      row.lastChild.append(bar);
    });
    parts.push(make("h2", `${run.name}: seconds of a step, ${short(step)} in all; parts may lie within others (mean of the last 20)`), table);
  }
  element("seconds").replaceChildren(...parts);
}

async function refresh() {
  try {
    runs = await ask("runs");
    chosen ??= FIRST.filter((name) => metricsOfAll().has(name));
    showRuns();
    showMetrics();
    await draw();
    await showSeconds();
    element("state").textContent = `as of ${new Date().toLocaleTimeString()}`;
    element("state").className = "";
  } catch (error) {
    element("state").textContent = `the server does not answer (${error.message})`;
    element("state").className = "problem";
  }
}

async function keepRefreshing() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

element("filter").oninput = showMetrics;
addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== element("filter")) {
    event.preventDefault();
    element("filter").focus();
  } else if (event.key === "Escape") {
    element("filter").value = "";
    showMetrics();
  }
});
addEventListener("resize", () => charts.forEach(({ figure, plot }) => plot?.setSize({ width: figure.clientWidth - 18, height: 220 })));
readAddress();
keepRefreshing();
