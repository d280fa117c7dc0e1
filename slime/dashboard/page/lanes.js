"use strict";
// Where the seconds of a step went, from the run's trace: per process, and its samples as lanes.

let traced = {}; // run -> {count, steps, read}
let drawnTrace = "";
const kinds = new Map(); // name of a span -> its colour

function colorOf(name) {
  if (!kinds.has(name)) kinds.set(name, kinds.size < COLORS.length ? color(kinds.size) : `hsl(${(kinds.size * 137.5) % 360} 55% 45%)`);
  return kinds.get(name);
}

async function showTime() {
  traced = await ask("traces");
  const there = chooser(element("when"), traced, (step) => { look({ step }); refresh(); });
  if (!there) {
    say(element("untraced"), "No run here has a trace: --trace FILE lets one write what each process does when.");
    return;
  }
  const wanted = `${looked.run}\n${looked.step}`;
  if (wanted === drawnTrace) return;
  drawnTrace = wanted;
  try {
    say(element("untraced"), "");
    const found = await ask(`trace?run=${encodeURIComponent(looked.run)}&step=${looked.step}`);
    spend(found);
    drawLanes(found);
  } catch (error) {
    say(element("untraced"), error.message);
    for (const id of ["spent", "lanes"]) element(id).replaceChildren();
  }
}

function spend({ seconds, processes, step }) {
  const parts = [make("h2", `step ${step}: ${short(seconds)} s, by process`)];
  for (const { name, seconds: own, idle } of processes) {
    const bar = make("div", undefined, { className: "stack" });
    const pieces = [...Object.entries(own), ["idle", idle]].filter(([, spent]) => spent > 0);
    for (const [kind, spent] of pieces) {
      const piece = make("span");
      piece.style.width = `${Math.min(100, (100 * spent) / seconds)}%`;
      piece.style.background = kind === "idle" ? "var(--soft)" : colorOf(kind);
      piece.title = `${kind}: ${short(spent)} s`;
      bar.append(piece);
    }
    parts.push(make("h3", name), bar, make("p", pieces.map(([kind, spent]) => `${kind} ${short(spent)} s`).join(", "), { className: "dim" }));
  }
  element("spent").replaceChildren(...parts);
}

function drawLanes({ seconds, spans, left_out }) {
  const lanes = new Map(), parts = [make("h2", "lanes")];
  for (const [process, lane, ...span] of spans) {
    const key = lane ? `${process}, sample lane ${lane}` : process;
    if (!lanes.has(key)) lanes.set(key, []);
    lanes.get(key).push(span);
  }
  for (const [name, found] of lanes) {
    const row = make("div", undefined, { className: "lane" }), track = make("div", undefined, { className: "track" });
    const open = []; // ends of the spans that this one lies within
    for (const [kind, start, duration, attrs] of found) {
      while (open.length && open.at(-1) <= start + 1e-9) open.pop();
      const bar = make("span", kind);
      bar.style.left = `${(100 * start) / seconds}%`;
      bar.style.width = `${(100 * duration) / seconds}%`;
      bar.style.top = `${15 * Math.min(3, open.length)}px`;
      bar.style.background = colorOf(kind);
      bar.title = [`${kind}: ${short(duration)} s, from ${short(start)} s on`, ...Object.entries(attrs).map(([key, value]) => `${key} ${value}`)].join(", ");
      track.append(bar);
      open.push(start + duration);
      track.style.height = `${Math.max(15 * Math.min(4, open.length), parseFloat(track.style.height) || 15)}px`;
    }
    row.append(make("div", name, { className: "name" }), track);
    parts.push(row);
  }
  if (left_out) parts.push(make("p", `${left_out} spans more are not drawn`, { className: "dim" }));
  const legend = make("p", undefined, { className: "legend" });
  for (const [kind, shown] of kinds) {
    const swatch = make("span", undefined, { className: "swatch" });
    swatch.style.background = shown;
    legend.append(swatch, make("span", kind));
  }
  element("lanes").replaceChildren(parts[0], legend, ...parts.slice(1));
}
