"use strict";
// Engines and ledger of each run: now, the last steps in rows, and sums of the whole run.

const SUMMED = { engines: false, ledger: true };
const HEADS = { engines: "engines by step", ledger: "groups left out or begun anew, by reason" };
const WITHOUT = { engines: "no metrics of engines yet", ledger: "no group was dropped, given up or left ungraded" };

async function showTables() {
  const [found, engines, ledgers] = await Promise.all([ask("tables"), ask("engines"), ask("ledger")]), parts = [];
  const shown = runs.map(({ name }) => name).filter((name) => !hidden.has(name) && found[name] && engines[name] && ledgers[name]); // others have just come
  for (const name of shown) {
    const part = (title) => [make("h2", `${name}: ${HEADS[title]}`), found[name][title].names.length ? tableOf(found[name][title], SUMMED[title]) : make("p", WITHOUT[title], { className: "dim" })];
    parts.push(...enginesOf(name, engines[name]), ...booksOf(name, ledgers[name]), ...part("ledger"), ...part("engines"));
  }
  if (element("tables").contains(document.activeElement)) return; // somebody is reading it
  element("tables").replaceChildren(...parts);
  for (const name of shown) drawBooks(name, ledgers[name]);
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
