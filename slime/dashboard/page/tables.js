"use strict";
// Engines and ledger of each run: now, the last steps in rows, and sums of the whole run.

const SUMMED = { engines: false, ledger: true };
const HEADS = { engines: "engines by step", ledger: "ledger" };
const WITHOUT = { engines: "no metrics of engines yet", ledger: "no group was dropped, given up or left ungraded" };

async function showTables() {
  const [found, engines] = await Promise.all([ask("tables"), ask("engines")]), parts = [];
  for (const run of runs) if (!hidden.has(run.name) && found[run.name] && engines[run.name]) { // else it has just come
    parts.push(...enginesOf(run.name, engines[run.name]));
    for (const [title, table] of Object.entries(found[run.name])) {
      parts.push(make("h2", `${run.name}: ${HEADS[title]}`));
      parts.push(table.names.length ? tableOf(table, SUMMED[title]) : make("p", WITHOUT[title], { className: "dim" }));
    }
  }
  if (element("tables").contains(document.activeElement)) return; // somebody is reading it
  element("tables").replaceChildren(...parts);
}

function tableOf({ names, totals, rows }, isSummed) {
  const box = make("div", undefined, { className: "wide", tabIndex: 0 }), table = make("table");
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const name of ["step", ...names]) head.append(make("th", name.replace(/[/_]/g, "$&\u200b"), { scope: "col" }));
  if (isSummed) rowOfValues(body, "all", totals).className = "total";
  for (const [step, ...values] of rows.reverse()) rowOfValues(body, step, values);
  box.append(table);
  return box;
}

function rowOfValues(body, name, values) {
  const row = body.insertRow();
  row.append(make("th", String(name), { scope: "row" }));
  for (const value of values) row.insertCell().textContent = value === null ? "" : short(value);
  return row;
}
