"use strict";
// The engines of a run: what each is doing, by the run itself, or as it was when the run was last heard of.

const MOST_ROWS = 300, FEW_ROWS = 20;
const COLUMNS = {
  engine: (row) => short(row.rank),
  model: (row) => row.model,
  state: (row) => row.state + (row.kind && row.kind !== "regular" ? ` (${row.kind})` : ""),
  since: (row) => (row.since ? clock(row.since) : ""),
  health: (row) => row.health,
  weights: (row) => row.version,
  running: (row) => count(row.running),
  waiting: (row) => count(row.waiting),
  "tokens/s": (row) => count(row.tokens_per_second),
  cache: (row) => (row.cache === null ? "" : `${Math.round(100 * row.cache)} %`),
  "last failure": (row) => (row.failure ? `${clock(row.failed)}: ${row.failure}` : ""),
  address: (row) => row.url,
};
const LEFT = { model: "word", state: "word", since: "word", health: "word", "last failure": "text", address: "word" };

function clock(at) {
  const when = new Date(1000 * at), today = new Date().toDateString() === when.toDateString();
  return today ? when.toLocaleTimeString() : when.toLocaleString();
}

function count(value) {
  return value === null ? "" : short(value);
}

function isUnwell(row) {
  return row.state === "dead" || (row.health !== "" && row.health !== "answers");
}

function enginesOf(name, { is_live, time, problem, rows }) {
  const parts = [make("h2", `${name}: engines`)];
  if (problem) parts.push(make("p", problem, { className: "problem" }));
  if (!rows.length) return [...parts, make("p", "the run has told nothing of its engines", { className: "dim" })];
  const age = time === null ? "" : `, ${clock(time)}, ${duration(Date.now() / 1000 - time)} ago`;
  const when = is_live ? "now, by the run itself" : `as the run last wrote it${age}`;
  parts.push(make("p", `${summed(rows)} (${when})`, { className: "dim" }));
  const rank = (row) => (isUnwell(row) ? 0 : row.state === "serving" ? 2 : 1);
  const sorted = rows.length > FEW_ROWS ? [...rows].sort((a, b) => rank(a) - rank(b)) : rows;
  parts.push(tableOfEngines(sorted.slice(0, MOST_ROWS)));
  if (rows.length > MOST_ROWS) parts.push(make("p", `${rows.length - MOST_ROWS} others are not shown`, { className: "dim" }));
  return parts;
}

function summed(rows) {
  const states = new Map(), add = (name) => rows.reduce((sum, row) => sum + (row[name] || 0), 0);
  for (const { state } of rows) states.set(state, (states.get(state) || 0) + 1);
  const told = [...states].map(([state, number]) => `${number} ${state}`).join("; ");
  return `${told}; requests: ${add("running")} running, ${add("waiting")} waiting; ${short(add("tokens_per_second"))} tokens/s`;
}

function tableOfEngines(rows) {
  const shown = Object.entries(COLUMNS).filter(([name, cell]) => name === "engine" || rows.some((row) => cell(row) !== ""));
  const box = make("div", undefined, { className: "wide", tabIndex: 0 }), table = make("table", undefined, { className: "engines" });
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const [name] of shown) head.append(make("th", name, { scope: "col", className: LEFT[name] || "" }));
  for (const row of rows) {
    const line = body.insertRow();
    for (const [name, cell] of shown) {
      const made = name === "engine" ? make("th", cell(row), { scope: "row" }) : make("td", cell(row));
      made.className = LEFT[name] || "";
      if ((name === "state" || name === "health") && isUnwell(row)) made.classList.add("problem");
      if (name === "since" && row.since) made.title = `${duration(Date.now() / 1000 - row.since)} ago`;
      line.append(made);
    }
  }
  box.append(table);
  return box;
}
