"use strict";
// Pictures: knows SVG and numbers, not where they come from.

const TIERS = ["device", "host", "store", "peer", "computed"];

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function stage(chart, top, unit, seconds) {
  const width = chart.clientWidth || 320, height = chart.clientHeight || 144;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren(
    svg("line", { class: "axis", x1: 0, x2: width, y1: height - 1, y2: height - 1 }),
    svg("text", { x: 2, y: 11 }, top ? `${short(top)}${unit}` : ""),
    svg("text", { x: width - 2, y: 11, class: "end" }, `the last ${seconds} s`));
  return { width, height };
}

function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e3) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 10 || Number.isInteger(number) ? String(Math.round(number)) : number.toPrecision(2);
}

function times(count) {
  return `${count.toLocaleString()} time${count === 1 ? "" : "s"}`;
}

// Columns of what was found where, one per look; the latest on the right.
function drawHits(chart, samples, count, seconds) {
  const total = (each) => TIERS.reduce((sum, tier) => sum + (each[tier] || 0), 0);
  const top = Math.max(0, ...samples.map(total));
  const { width, height } = stage(chart, top, " tokens/s", seconds);
  const step = width / count, room = height - 16;
  samples.forEach((each, index) => {
    let y = height;
    for (const tier of TIERS) {
      const size = ((each[tier] || 0) / (top || 1)) * room;
      if (size <= 0) continue;
      y -= size;
      chart.append(svg("rect", { class: tier, y, height: size, width: Math.max(1, step - 1),
        x: width - (samples.length - index) * step }));
    }
  });
}

// Two lines: as it was, and as it would have been, where that is known.
function drawLines(chart, samples, count, seconds) {
  const known = samples.filter((each) => each !== null);
  const top = Math.max(0, ...known.map((each) => Math.max(each.with, each.without)));
  const { width, height } = stage(chart, top, " s", seconds);
  for (const line of ["with", "without"]) {
    const points = [];
    samples.forEach((each, index) => {
      if (each === null || each[line] === null) return;
      const x = width - (samples.length - 1 - index) * (width / count);
      points.push([x, height - 1 - (each[line] / (top || 1)) * (height - 16)]);
    });
    if (points.length === 1) points.unshift([points[0][0] - 4, points[0][1]]); // else nothing is seen
    chart.append(svg("polyline", { class: line, points: points.map((each) => each.map((at) => at.toFixed(1)).join()).join(" ") }));
  }
}

// Runs of pages: along, where in the prompt; down, one row per branch, of those that leave one place
// the one used last first; colour, the fastest tier; on it, how often it was used; at the end of a
// tenant's first row, its name. `told` is given the words for the one that is pointed at.
function drawTree(chart, runs, widthOf, told) {
  const below = runs.map(() => []), tops = [];
  runs.forEach((run, index) => (run.parent < 0 ? tops : below[run.parent]).push(index));
  const byUse = (one, other) => runs[other].age - runs[one].age;
  const waiting = tops.sort(byUse);
  let rows = 0;
  while (waiting.length) {
    const index = waiting.pop(), run = runs[index];
    run.row ??= rows++;
    const children = below[index].sort(byUse);
    if (children.length) runs[children.at(-1)].row = run.row; // goes on in the same row
    waiting.push(...children);
  }
  const longest = Math.max(1, ...runs.map((run) => run.last));
  const isShared = runs.some((run) => run.tenant !== runs[0].tenant);
  const scale = (widthOf - (isShared ? 110 : 0)) / longest, tall = 18;
  chart.setAttribute("viewBox", `0 0 ${widthOf} ${Math.max(1, rows) * tall + 4}`);
  chart.style.height = `${Math.max(1, rows) * tall + 4}px`;
  chart.replaceChildren();
  const named = new Set();
  for (const run of runs) {
    const tier = run.device ? "device" : run.host ? "host" : run.store ? "store" : "computed";
    const warmth = 0.35 + 0.65 / (1 + run.age / 20);
    const x = run.first * scale + 0.5, width = Math.max(1.5, (run.last - run.first) * scale - 1);
    const box = svg("rect", { class: tier, x, y: run.row * tall + 2, width, height: tall - 3, rx: 3,
      "fill-opacity": warmth.toFixed(2) });
    const where = ["device", "host", "store"].filter((each) => run[each]).join(", ");
    const words = `Pages ${run.first} to ${run.last} of a prompt: on ${where || "no tier"}, ` +
      `used ${times(run.hits)}, the last time ${run.age} uses of others ago; ` +
      (run.tenant ? `tenant ${run.tenant}` : "no tenant");
    box.append(svg("title", {}, words));
    for (const kind of ["click", "mouseenter"]) box.addEventListener(kind, () => told(words));
    chart.append(box);
    if (run.hits && width > 30) {
      const kind = warmth < 0.75 ? "on pale" : "on";
      chart.append(svg("text", { class: kind, x: x + 4, y: run.row * tall + 13.5 }, `${short(run.hits)}×`));
    }
    if (isShared && !named.has(run.tenant)) {
      named.add(run.tenant);
      chart.append(svg("text", { class: "tenant", x: widthOf - 104, y: run.row * tall + 13.5 }, run.tenant.slice(0, 16) || "no tenant"));
    }
  }
  return rows;
}
