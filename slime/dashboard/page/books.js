"use strict";
// The books on groups of samples: where each group is, rollout by rollout, and loudly where they do not balance.

const PLACES = { trained: "#2ca02c", filtered: "#8c8c8c", dropped: "#d62728", buffered: "#1f77b4", leased: "#ff9f3f" };
const HEADINGS = ["rollout", "carried over", "issued", ...Object.keys(PLACES), "balance"];
const MEANING = "Of each rollout: groups that were carried over and issued are those that it trained, filtered and dropped, "
  + "those that still wait in the data source (buffered), and those that are being generated or are done before their turn (leased).";
const books = new Map(); // run -> {figure, plot}

function booksOf(name, { now, last, unbalanced }) {
  const parts = [make("h2", `${name}: ledger`)];
  if (now === null) return [...parts, make("p", "not recorded: a data source without books, or a run of an earlier version", { className: "dim" })];
  const [step, issued, ...rest] = now, off = rest.pop();
  if (unbalanced) parts.push(make("p", whatIsWrong(unbalanced, step, off), { className: "loud" }));
  const sum = Object.keys(PLACES).map((place, index) => `${short(rest[index])} ${place}`).join(" + ");
  const sign = Math.abs(issued - rest.reduce((all, groups) => all + groups, 0)) < 1e-6 ? "=" : "≠";
  parts.push(make("p", `After rollout ${step}: ${short(issued)} groups issued ${sign} ${sum}${off ? "" : ". They balance."}`, { className: "sum" }));
  if (!books.has(name)) books.set(name, { figure: make("figure", undefined, { className: "books" }) });
  parts.push(books.get(name).figure, make("p", MEANING, { className: "dim" }), tableOfBooks(now, last));
  return parts;
}

function whatIsWrong({ first, last, count }, step, off) {
  const since = first === last ? `after rollout ${first}` : `after ${count} rollouts, the first of them ${first}`;
  const still = last === step ? `; now ${short(off)} groups have no place, or more than one` : `; they do again after rollout ${step}`;
  return `The books do not balance: ${since}${still}`;
}

function tableOfBooks([, ...now], rows) {
  const box = make("div", undefined, { className: "wide", tabIndex: 0 }), table = make("table");
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const name of HEADINGS) head.append(make("th", name, { scope: "col" }));
  const line = (name, values) => {
    const row = rowOfValues(body, name, values.slice(0, -1)), off = values.at(-1), cell = row.insertCell();
    cell.textContent = off ? `off by ${short(off)}` : "yes";
    cell.className = off ? "loud" : "";
    return row;
  };
  line("all", [null, ...now]).className = "total";
  for (const [step, ...values] of [...rows].reverse()) line(step, values);
  box.append(table);
  return box;
}

function drawBooks(name, { curve }) {
  const drawn = books.get(name);
  if (!drawn || !drawn.figure.isConnected || !curve.length) return;
  const steps = curve.map(([step]) => step), own = Object.keys(PLACES).map((_, place) => curve.map((row) => row[3 + place]));
  const stacked = own.map((_, place) => steps.map((_, at) => own.slice(0, place + 1).reduce((sum, column) => sum + column[at], 0)));
  const given = curve.map((row) => row[1] + row[2]), wrong = curve.map((row, at) => (row.at(-1) ? Math.max(given[at], stacked.at(-1)[at]) : null));
  drawn.own = own;
  const data = [steps, ...stacked.reverse(), given, wrong];
  drawn.plot ??= plotOfBooks(drawn);
  update(drawn.plot, data);
}

function plotOfBooks(drawn) {
  const text = getComputedStyle(document.body).color, grid = { stroke: "#8883", width: 1 }, axis = { stroke: text, grid, ticks: grid };
  // The highest first: the others are drawn over it.
  const places = Object.entries(PLACES).map(([label, fill], place) => ({
    label, fill, stroke: fill, width: 1, points: { show: false },
    value: (_, __, ___, at) => (at === null ? "-" : short(drawn.own[place][at])),
  })).reverse();
  const given = { label: "carried over and issued", stroke: text, width: 1.5, dash: [4, 3], points: { show: false }, value: (_, value) => short(value) };
  const wrong = { label: "does not balance", stroke: "#f0f", width: 0, points: { show: true, size: 10, fill: "#f0f" }, value: (_, value) => (value === null ? "-" : "here") };
  return new uPlot({
    width: drawn.figure.clientWidth - 18, height: 220, scales: { x: { time: false }, y: { range: (_, __, most) => [0, 1.05 * Math.max(1, most)] } },
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] }, { ...axis, size: 60 }], cursor: { sync: { key: "step" } }, series: [{ label: "rollout" }, ...places, given, wrong],
  }, [[], ...places.map(() => []), [], []], drawn.figure);
}
