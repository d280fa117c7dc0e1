"use strict";
// What all parts of the page use, and the curves. What is shown stands behind the # of the address, so that it can
// be kept.

const FIRST = ["rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm",
  "train/entropy_loss", "train/train_rollout_logprob_abs_diff", "perf/step_time"];
const COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"];
const LOOKED = ["run", "step", "sample", "from", "colour"];
const element = (id) => document.getElementById(id);
const color = (index) => COLORS[index % COLORS.length];

let runs = [];
let chosen = []; // names of metrics, in the order of the page
let isOwn = false; // whether a person has chosen them; else they are those of FIRST that there are by now
let hidden = new Set(); // names of runs
let view = "curves";
let looked = {}; // what is chosen in other views: run, step, number of a sample, colour, ...
const charts = new Map(); // metric -> {figure, plot, drawn}
const rows = new Map(); // metric -> its row in the list
const boxes = new Map(); // run -> its label and what is said there

function make(tag, text, more = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, more);
}

function place(parent, wanted) {
  // What stays is not moved: a focus, a click under way and what a screen reader reads would be lost.
  const kept = [...parent.children], focused = document.activeElement;
  if (kept.length === wanted.length && kept.every((child, index) => child === wanted[index])) return;
  parent.replaceChildren(...wanted);
  if (parent.contains(focused)) focused.focus({ preventScroll: true });
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
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
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `HTTP ${answer.status}`);
  return answer.json();
}

function metricsOfAll() {
  const found = new Map();
  for (const run of runs) for (const [name, { axis, last }] of Object.entries(run.metrics)) {
    if (!found.has(name)) found.set(name, { axis, last });
  }
  return new Map([...found].sort(([a], [b]) => (a < b ? -1 : 1)));
}

function first() {
  // Of a run of several policies also those of each: train/POLICY/loss.
  const names = [...metricsOfAll().keys()];
  return FIRST.flatMap((wanted) => {
    const [axis, ...rest] = wanted.split("/"), parts = rest.length + 2;
    const isOfPolicy = (name) => name.startsWith(`${axis}/`) && name.endsWith(`/${rest.join("/")}`) && name.split("/").length === parts;
    return names.filter((name) => name === wanted || isOfPolicy(name));
  });
}

function readAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  isOwn = kept.has("m");
  chosen = kept.getAll("m").filter(Boolean);
  hidden = new Set(kept.getAll("without"));
  view = kept.get("view") || "curves";
  looked = Object.fromEntries(LOOKED.filter((name) => kept.has(name)).map((name) => [name, kept.get(name)]));
}

function writeAddress() {
  const kept = new URLSearchParams();
  if (isOwn) for (const name of chosen.length ? chosen : [""]) kept.append("m", name);
  for (const name of hidden) kept.append("without", name);
  if (view !== "curves") kept.append("view", view);
  for (const name of LOOKED) if (looked[name] !== undefined) kept.append(name, looked[name]);
  history.replaceState(null, "", `#${kept}`);
}

function boxOf(name, index) {
  const label = make("label"), box = make("input", undefined, { type: "checkbox", checked: !hidden.has(name) });
  box.onchange = () => { box.checked ? hidden.delete(name) : hidden.add(name); writeAddress(); refresh(); };
  const swatch = make("span", undefined, { className: "swatch" }), text = make("span");
  const problem = make("span", undefined, { className: "problem" });
  swatch.style.background = color(index);
  label.append(box, swatch, text, problem);
  return { label, text, problem };
}

function showRuns() {
  runs.forEach((run, index) => {
    if (!boxes.has(run.name)) boxes.set(run.name, boxOf(run.name, index));
    const { text, problem } = boxes.get(run.name);
    const steps = run.ends.rollout !== undefined ? `step ${run.ends.rollout}` : "no step yet";
    const read = isReading(run) ? `, ${Math.floor(100 * run.read)} % read` : "";
    const age = run.wrote ? `, ${duration(run.wrote - run.began)}, wrote ${duration(Date.now() / 1000 - run.wrote)} ago` : "";
    say(text, `${run.name}: ${steps}${read}${age}`);
    say(problem, run.problem || "");
  });
  place(element("runs"), runs.map((run) => boxes.get(run.name).label));
}

function isReading(run) {
  return !run.problem && run.read < 1;
}

function rowOf(name) {
  const row = make("li"), button = make("button", undefined, { type: "button" });
  button.append(make("span", name.replace(/[/_]/g, "$&\u200b")), make("span", undefined, { className: "value" }));
  button.onclick = () => choose(name);
  row.append(button);
  return row;
}

function showMetrics() {
  const wanted = element("filter").value.toLowerCase().split(/\s+/), shown = [];
  for (const [name, { last }] of metricsOfAll()) {
    if (!wanted.every((word) => name.toLowerCase().includes(word))) continue;
    if (!rows.has(name)) rows.set(name, rowOf(name));
    const row = rows.get(name), button = row.firstChild;
    button.setAttribute("aria-pressed", chosen.includes(name));
    say(button.lastChild, short(last));
    shown.push(row);
  }
  place(element("metrics"), shown);
}

function choose(name) {
  chosen = chosen.includes(name) ? chosen.filter((other) => other !== name) : [name, ...chosen];
  isOwn = true;
  writeAddress();
  showMetrics();
  refresh();
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
    axes: [axis, { ...axis, size: 76, values: (_, ticks) => ticks.map(short) }],
    cursor: { sync: { key: "step" } }, series: [{ label: "step" }, ...series],
  }, [[], ...names.map(() => [])], figure);
}

function figureOf(metric) {
  const figure = make("figure");
  figure.append(make("h2", metric));
  figure.setAttribute("aria-label", metric);
  return figure;
}

function update(plot, data) {
  // Whoever has drawn a box around a part goes on to see that part.
  const [steps] = plot.data, { min, max } = plot.scales.x;
  const isPart = steps.length > 1 && (min > steps[0] || max < steps.at(-1));
  plot.setData(data, !isPart);
  if (isPart) plot.setScale("x", { min, max });
}

async function draw() {
  const names = runs.map((run) => run.name).filter((name) => !hidden.has(name)), drawn = names.join("\n");
  for (const [metric, { figure, plot }] of charts) if (!chosen.includes(metric)) {
    plot?.destroy();
    figure.remove();
    charts.delete(metric);
  }
  for (const metric of chosen) if (!charts.has(metric)) charts.set(metric, { figure: figureOf(metric) });
  place(element("charts"), chosen.map((metric) => charts.get(metric).figure));
  await Promise.all(chosen.map(async (metric) => {
    const curves = await ask(`curves?metric=${encodeURIComponent(metric)}`), chart = charts.get(metric);
    if (!chart) return; // it was closed meanwhile
    const there = names.filter((name) => curves[name]);
    if (chart.drawn !== drawn) {
      chart.plot?.destroy();
      chart.plot = plotOf(metric, chart.figure, there);
      chart.drawn = drawn;
    }
    update(chart.plot, joined(curves, there));
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

function tell(text, isProblem) {
  say(element("state"), text);
  say(element("alarm"), isProblem ? text : ""); // read aloud, unlike the time of each look
  element("state").className = isProblem ? "problem" : "";
}

function chooseOnly(name) {
  if (!chosen.includes(name)) choose(name);
  charts.get(name)?.figure.scrollIntoView({ block: "center" });
}
