"use strict";
// The views of the page, its keys, and what asks the server every few seconds while the page is looked at.

const EVERY_MS = 5000, WHILE_READING_MS = 300;
const VIEWS = {
  curves: async () => { await draw(); await showSeconds(); },
  samples: showSamples,
  engines: showTables,
  time: showTime,
};
const TITLES = { curves: "Curves", samples: "Samples", engines: "Engines, ledger", time: "Time" };

function show(name) {
  view = VIEWS[name] ? name : "curves";
  for (const part of document.querySelectorAll("[data-view]")) part.hidden = part.dataset.view !== view;
  for (const button of element("views").children) button.setAttribute("aria-pressed", button.value === view);
  document.body.classList.toggle("whole", view !== "curves");
  writeAddress();
  refresh();
}

async function refresh() {
  try {
    runs = await ask("runs");
    if (!isOwn) chosen = first();
    showRuns();
    showAlerts();
    showMetrics();
    await VIEWS[view]();
    tell(`as of ${new Date().toLocaleTimeString()}`, false);
  } catch (error) {
    tell(`the server does not answer (${error.message}); one of slime train ends with its run, slime dashboard RUN_DIR shows it again`, true);
  }
}

async function keepRefreshing() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, runs.some(isReading) ? WHILE_READING_MS : EVERY_MS));
    if (!document.hidden) await refresh();
  }
}

function isWriting() {
  return ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    element("filter").value = "";
    showMetrics();
    document.activeElement.blur();
  }
  if (isWriting()) return;
  const steps = { "[": -1, "]": 1 }[event.key], form = { samples: "which", time: "when" }[view];
  if (event.key === "/") {
    event.preventDefault();
    if (view !== "curves") show("curves");
    element("filter").focus();
  } else if (/^[1-4]$/.test(event.key)) {
    show(Object.keys(VIEWS)[event.key - 1]);
  } else if (steps && form) {
    element(form).by?.(steps);
  } else if (view === "samples" && ["j", "k"].includes(event.key) && sample) {
    const number = sample.number + (event.key === "j" ? 1 : -1);
    if (number >= 0 && number < listed.count) pick(number);
  }
}

Object.entries(TITLES).forEach(([name, title], index) => {
  const button = make("button", title, { type: "button", value: name, title: `key ${index + 1}` });
  button.onclick = () => show(name);
  element("views").append(button);
});
element("filter").oninput = showMetrics;
addEventListener("keydown", press);
addEventListener("resize", () => [...charts.values(), ...books.values()].forEach(({ figure, plot }) => figure.isConnected && plot?.setSize({ width: figure.clientWidth - 18, height: 220 })));
readAddress();
show(view);
keepRefreshing();
