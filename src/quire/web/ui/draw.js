"use strict";
// Pictures: knows SVG and numbers, not where they come from.

const TIERS = ["device", "host", "store", "peer", "computed"];

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function stage(chart, top, unit) {
  const width = chart.clientWidth || 320, height = chart.clientHeight || 144;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren(
    svg("line", { class: "axis", x1: 0, x2: width, y1: height - 1, y2: height - 1 }),
    svg("text", { x: 2, y: 11 }, `${short(top)}${unit}`));
  return { width, height };
}

function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e3) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 10 || number === 0 ? String(Math.round(number)) : number.toPrecision(2);
}

// Columns of what was found where, one per look; the latest on the right.
function drawHits(chart, samples, count) {
  const total = (each) => TIERS.reduce((sum, tier) => sum + (each[tier] || 0), 0);
  const top = Math.max(1, ...samples.map(total));
  const { width, height } = stage(chart, top, " tokens/s");
  const step = width / count, room = height - 16;
  samples.forEach((each, index) => {
    let y = height;
    for (const tier of TIERS) {
      const size = ((each[tier] || 0) / top) * room;
      if (size <= 0) continue;
      y -= size;
      chart.append(svg("rect", { class: tier, y, height: size, width: Math.max(1, step - 1),
        x: width - (samples.length - index) * step }));
    }
  });
}

// Two lines: as it was, and as it would have been.
function drawLines(chart, samples, count) {
  const known = samples.filter((each) => each !== null);
  const top = Math.max(1e-3, ...known.map((each) => Math.max(each.with, each.without)));
  const { width, height } = stage(chart, top, " s");
  for (const line of ["with", "without"]) {
    const points = [];
    samples.forEach((each, index) => {
      if (each === null) return;
      const x = width - (samples.length - 1 - index) * (width / count);
      points.push(`${x.toFixed(1)},${(height - 1 - (each[line] / top) * (height - 16)).toFixed(1)}`);
    });
    chart.append(svg("polyline", { class: line, points: points.join(" ") }));
  }
}

// Runs of pages: along, where in the prompt; down, one row per branch; colour, the fastest tier;
// at the end of a tenant's first row, its name.
function drawTree(chart, runs, widthOf) {
  const rows = [], below = runs.map(() => []);
  const tops = [];
  runs.forEach((run, index) => (run.parent < 0 ? tops : below[run.parent]).push(index));
  const place = (index) => {
    let first = rows.length;
    if (!below[index].length) rows.push(null);
    for (const child of below[index]) place(child);
    runs[index].row = first;
  };
  tops.forEach(place);
  const longest = Math.max(1, ...runs.map((run) => run.last));
  const isShared = runs.some((run) => run.tenant !== runs[0].tenant);
  const scale = (widthOf - (isShared ? 110 : 0)) / longest, tall = 14;
  chart.setAttribute("viewBox", `0 0 ${widthOf} ${Math.max(1, rows.length) * tall + 4}`);
  chart.replaceChildren();
  const named = new Set();
  for (const run of runs) {
    const tier = run.device ? "device" : run.host ? "host" : run.store ? "store" : "computed";
    const warmth = 0.35 + 0.65 / (1 + run.age / 20);
    const box = svg("rect", { class: tier, x: run.first * scale + 0.5, y: run.row * tall + 2,
      width: Math.max(1.5, (run.last - run.first) * scale - 1), height: tall - 4, rx: 2,
      "fill-opacity": warmth.toFixed(2) });
    const where = ["device", "host", "store"].filter((each) => run[each]).join(", ");
    box.append(svg("title", {}, `pages ${run.first}–${run.last} on ${where || "no tier"}, ` +
      `used ${run.hits} times, ${run.tenant ? `tenant ${run.tenant}` : "no tenant"}`));
    chart.append(box);
    if (isShared && !named.has(run.tenant)) {
      named.add(run.tenant);
      chart.append(svg("text", { x: widthOf - 104, y: run.row * tall + 11 }, run.tenant.slice(0, 16) || "no tenant"));
    }
  }
  return rows.length;
}
