"use strict";
// What has gone wrong, by the rules of the server: above all views, with ways to what shows it.

const faults = new Map(); // run, rule and metric -> its row

function faultOf(run, index, { metric, step }) {
  const row = make("li"), head = make("p"), swatch = make("span", undefined, { className: "swatch" });
  const name = make("strong"), when = make("span"), found = make("span"), advice = make("p", "", { className: "advice" });
  swatch.style.background = color(index);
  const curve = make("button", "curve", { type: "button" });
  curve.title = metric;
  curve.onclick = () => { show("curves"); chooseOnly(metric); };
  head.append(swatch, name, when, found, curve);
  if (metric.startsWith("rollout/ledger/")) head.append(ledgerButton());
  else if (metric.startsWith("rollout/")) head.append(sampleButton(run, step));
  if (metric.startsWith("perf/")) head.append(timeButton(run, step));
  row.append(head, advice);
  return { row, name, when, found, advice };
}

function sampleButton(run, step) {
  const button = make("button", "samples", { type: "button", title: `samples of rollout ${step}` });
  button.onclick = () => { look({ run, step, sample: undefined, from: undefined }); show("samples"); };
  return button;
}

function ledgerButton() {
  const button = make("button", "ledger", { type: "button", title: "where each group of samples is" });
  button.onclick = () => show("engines");
  return button;
}

function timeButton(run, step) {
  const button = make("button", "time", { type: "button", title: `what each process did in step ${step}` });
  button.onclick = () => { look({ run, step }); show("time"); };
  return button;
}

function showAlerts() {
  const shown = [];
  runs.forEach((run, index) => {
    if (hidden.has(run.name)) return;
    for (const alert of run.alerts) {
      const key = [run.name, alert.rule, alert.metric, alert.step].join("\n");
      if (!faults.has(key)) faults.set(key, faultOf(run.name, index, alert));
      const fault = faults.get(key);
      say(fault.name, alert.rule);
      say(fault.when, runs.length > 1 ? `${run.name}, ${alert.when}` : alert.when);
      say(fault.found, alert.found);
      say(fault.advice, alert.advice);
      fault.row.className = alert.is_over ? "over" : "";
      shown.push(fault.row);
    }
  });
  place(element("faults"), shown);
  const count = shown.length === 1 ? "1 alert" : `${shown.length} alerts`;
  say(element("alarms"), shown.length ? count : runs.some(isReading) ? "looking for faults" : "no alerts: no rule has fired");
  element("alerts").className = shown.length ? "fired" : "";
}
