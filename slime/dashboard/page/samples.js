"use strict";
// Samples of a step, from recordings of the run: a list, and one of them token by token, coloured by a value. What
// a model wrote is only ever the text of a node.

let recorded = {}; // run -> {count, steps, trained}
let listed = { count: 0, samples: [] };
let sample; // what is shown
let at = -1; // the token that is looked at
let asked = ""; // what is shown or on its way
const BEFORE = "log-prob, before the step", AFTER = "log-prob, after the step";
const COLOURED = ["log-prob, engine", "log-prob, trainer", "gap", BEFORE, AFTER, "change by the step", "advantage", "mask", "mask, trained", "version"];

function field(name, node) {
  const label = make("label", `${name} `);
  label.append(node);
  return label;
}

function look(changes) {
  Object.assign(looked, changes);
  for (const name of LOOKED) if (looked[name] === undefined) delete looked[name];
  writeAddress();
}

function chooser(form, found, change, more = []) {
  // Run and step, of those that there are. Made anew only when there are others.
  const names = Object.keys(found).filter((name) => found[name].count), signature = names.join("\n");
  form.found = found;
  if (form.made !== signature) {
    form.made = signature;
    const run = make("select"), step = make("input", undefined, { type: "number", min: 0, required: true });
    run.name = "run";
    step.name = "step";
    for (const name of names) run.append(make("option", name, { value: name }));
    const back = make("button", "◀", { type: "button", title: "step before ( [ )" });
    const on = make("button", "▶", { type: "button", title: "next step ( ] )" });
    back.setAttribute("aria-label", "step before");
    on.setAttribute("aria-label", "next step");
    form.by = (count) => change(beside(form.found[looked.run]?.steps || [], +looked.step, count));
    back.onclick = () => form.by(-1);
    on.onclick = () => form.by(1);
    run.onchange = () => { look({ run: run.value }); change(undefined); };
    step.onchange = () => change(step.value === "" ? undefined : +step.value);
    form.onsubmit = (event) => event.preventDefault();
    form.replaceChildren(field("run", run), field("step", step), back, on, ...more);
  }
  if (names.length && !names.includes(looked.run)) look({ run: names[0] });
  if (names.length && looked.step === undefined) look({ step: found[looked.run].steps.at(-1) });
  form.hidden = !names.length;
  if (!names.length) return false;
  form.elements.run.value = looked.run;
  if (document.activeElement !== form.elements.step) form.elements.step.value = looked.step;
  return true;
}

function beside(steps, step, count) {
  // The step that is so many further on, of those that are listed; else by counting.
  const index = steps.indexOf(step);
  return index < 0 ? Math.max(0, step + count) : steps[Math.min(steps.length - 1, Math.max(0, index + count))];
}

async function showSamples() {
  recorded = await ask("recordings");
  const there = chooser(element("which"), recorded, (step) => {
    look({ step: step === undefined ? undefined : step, sample: undefined, from: undefined });
    refresh();
  });
  if (!there) {
    say(element("unread"), "No run here has recorded its rollouts: --dump-details DIR, or --save-debug-rollout-data, lets one do so.");
    return;
  }
  const wanted = [looked.run, looked.step, looked.sample, looked.from].join("\n");
  if (wanted === asked) return;
  asked = wanted;
  try {
    say(element("unread"), "reading the recording ...");
    const where = `run=${encodeURIComponent(looked.run)}&step=${looked.step}`;
    listed = await ask(`samples?${where}`);
    listSamples();
    if (looked.sample === undefined && listed.samples.length) look({ sample: listed.samples[0].number });
    asked = [looked.run, looked.step, looked.sample, looked.from].join("\n");
    sample = await ask(`sample?${where}&number=${looked.sample ?? 0}&start=${looked.from ?? 0}`);
    at = -1;
    say(element("unread"), "");
    showSample();
  } catch (error) {
    say(element("unread"), error.message);
    element("samples").replaceChildren();
    element("sample").hidden = true;
  }
}

function rewardText(reward) {
  if (reward === null || typeof reward !== "object") return typeof reward === "number" ? short(reward) : reward ?? "-";
  return Object.entries(reward).map(([name, value]) => `${name} ${rewardText(value)}`).join(", ");
}

function listSamples() {
  const table = element("samples");
  const left = listed.count - listed.samples.length;
  table.replaceChildren(make("caption", `${listed.count} samples${left > 0 ? `, the first ${listed.samples.length} of them` : ""}`));
  const head = table.createTHead().insertRow();
  for (const name of ["sample", "group", "reward", "label", "tokens", "trained", "status"]) head.append(make("th", name, { scope: "col" }));
  head.append(make("th", "response", { scope: "col", className: "text" }));
  const body = table.createTBody();
  for (const found of listed.samples) {
    const row = body.insertRow(), button = make("button", String(found.index ?? found.number), { type: "button" });
    button.onclick = () => pick(found.number);
    row.insertCell().append(button);
    const cells = [found.group ?? "-", rewardText(found.reward), found.label, found.length, found.removed ? "removed" : found.trained, found.status, found.response];
    for (const text of cells) row.insertCell().textContent = text;
    row.lastChild.className = "text";
    row.dataset.number = found.number;
  }
}

function pick(number) {
  look({ sample: number, from: undefined });
  refresh();
}

function showSample() {
  const section = element("sample"), { values } = sample;
  section.hidden = false;
  for (const row of element("samples").tBodies[0]?.rows || []) row.setAttribute("aria-current", +row.dataset.number === sample.number);
  const colours = COLOURED.filter((name) => values[name]).concat(Object.keys(values).filter((name) => !COLOURED.includes(name)));
  if (!colours.includes(looked.colour)) looked.colour = colours[0];
  const select = make("select");
  for (const name of colours) select.append(make("option", name, { value: name }));
  select.value = looked.colour ?? "";
  select.onchange = () => { look({ colour: select.value }); paint(); };
  const facts = [`sample ${sample.index ?? sample.number}`, `group ${sample.group ?? "-"}`, `reward ${rewardText(sample.reward)}`,
    `label ${sample.label || "-"}`, sample.status, `${sample.of_prompt} + ${sample.total - sample.of_prompt} tokens`];
  if (sample.removed) facts.push("removed: not trained on");
  const tokens = make("div", undefined, { id: "tokens", tabIndex: 0 });
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", "tokens; arrow keys go through them");
  sample.texts.forEach((text, index) => tokens.append(tokenOf(text, index)));
  tokens.onclick = (event) => event.target.dataset.at && pointAt(+event.target.dataset.at);
  tokens.onkeydown = moveAmong;
  const line = make("p", " ", { id: "token" });
  line.setAttribute("aria-live", "polite");
  section.replaceChildren(make("h2", facts.join(", ")), field("tokens coloured by", select), make("span", "", { id: "scale" }), tokens, line, ...whatIsMissing(values), ...windows(), ...wholeTexts());
  paint();
}

function whatIsMissing(values) {
  if (values[BEFORE] && values[AFTER]) return [];
  return [make("p", "log-probs before and after the training step: not recorded (--save-debug-log-probs; not with context parallelism)", { className: "dim" })];
}

function tokenOf(text, index) {
  const isOfPrompt = sample.start + index < sample.of_prompt;
  const node = make("span", text === "" ? "·" : text.replace(/\n/g, "↵\n"), { className: isOfPrompt ? "token prompt" : "token" });
  node.dataset.at = index;
  return node;
}

function windows() {
  const end = sample.start + sample.ids.length, parts = [];
  const jump = (text, from) => {
    const button = make("button", text, { type: "button" });
    button.onclick = () => { look({ from }); refresh(); };
    parts.push(button);
  };
  if (sample.start > 0) jump("tokens before", Math.max(0, sample.start - 2000));
  if (end < sample.total) jump("further tokens", end);
  if (parts.length) parts.push(make("span", ` ${sample.start} to ${end} of ${sample.total}`));
  return parts;
}

function wholeTexts() {
  return ["prompt", "response"].map((name) => {
    const box = make("details");
    box.append(make("summary", name), make("pre", sample[name]));
    return box;
  });
}

function paint() {
  const column = sample.values[looked.colour] || [], numbers = column.filter((value) => typeof value === "number");
  const most = Math.max(1e-12, ...numbers.map(Math.abs)), kinds = [...new Set(column.filter((value) => value !== null))];
  const isMask = looked.colour?.startsWith("mask"), isNumber = numbers.length > 0;
  [...element("tokens").children].forEach((node, index) => {
    const value = column[index];
    node.classList.toggle("masked", isMask && value === 0);
    if (value === null || value === undefined) node.style.background = "";
    else if (isNumber) node.style.background = shade(isMask ? value : value / most);
    else node.style.background = `${color(kinds.indexOf(value))}55`;
  });
  const range = isMask ? "blue: trained on; struck out: not" : numbers.length ? `${short(Math.min(...numbers))} (${numbers.some((n) => n < 0) ? "red" : "pale"}) to ${short(Math.max(...numbers))}` : kinds.map((kind) => `version ${kind}`).join(", ");
  say(element("scale"), ` ${range}`);
}

function shade(part) {
  const strength = Math.min(1, Math.abs(part)) * 0.75;
  return part < 0 ? `rgba(214, 39, 40, ${strength})` : `rgba(31, 119, 180, ${strength})`;
}

function pointAt(index) {
  const nodes = element("tokens").children;
  if (index < 0 || index >= nodes.length) return;
  nodes[at]?.classList.remove("at");
  at = index;
  nodes[at].classList.add("at");
  nodes[at].scrollIntoView({ block: "nearest" });
  const told = Object.entries(sample.values).filter(([, column]) => column[at] !== null && column[at] !== undefined)
    .map(([name, column]) => `${name} ${typeof column[at] === "number" ? short(column[at]) : column[at]}`);
  const of = sample.start + at < sample.of_prompt ? "of the prompt" : `${sample.start + at - sample.of_prompt} of the response`;
  say(element("token"), [`token ${of}`, `id ${sample.ids[at]}`, ...told].join(", "));
}

function moveAmong(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -at, End: sample.ids.length - 1 - at }[event.key];
  if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  pointAt(Math.min(sample.ids.length - 1, Math.max(0, at + by)));
}
