"use strict";
// Looks at the server twice in three seconds and shows what it says. Knows its paths, no pictures.

const EVERY_MS = 1500, KEPT = 60;
const SHARED = { "cache-control": "max-age=1" }; // one made for another page will do
const $ = (id) => document.getElementById(id);
const past = { hits: [], ttft: [], last: null, speed: 0 };

function keyed(id) {
  const key = $(id).value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", ...options });
  if (answer.ok) return answer;
  const why = await answer.json().then((body) => body.error?.message, () => "");
  throw Object.assign(new Error(why || `${path}: ${answer.status}`), { status: answer.status });
}

// null: nobody may ask here; undefined: no answer this time, and what is shown stays.
function admin(path) {
  return $("admin-key").value.trim()
    ? ask(path, { headers: { ...SHARED, ...keyed("admin-key") } }).then((answer) => answer.json())
      .catch((error) => ([401, 403].includes(error.status) ? null : undefined))
    : Promise.resolve(null);
}

function withKey(what) {
  return $("admin-key").value.trim() ? `The admin key was not taken: ${what} need it.`
    : `With the admin key (Keys, above): ${what}.`;
}

// Prometheus's text → {name: [[labels, value], …]}
function metrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    (found[match[1]] ||= []).push([labels, Number(match[3])]);
  }
  return found;
}

const sum = (rows, test = () => true) =>
  (rows || []).filter(([labels]) => test(labels)).reduce((total, [, value]) => total + value, 0);
const one = (rows, key, value) => sum(rows, (labels) => labels[key] === value);

function text(id, words) { if ($(id).textContent !== words) $(id).textContent = words; }

function row(cells, kind = "td") {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const box = document.createElement(kind);
    if (cell instanceof Node) box.append(cell); else box.textContent = cell;
    line.append(box);
  }
  return line;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

function lines(id, all) {
  $(id).replaceChildren(...all.map((words) => Object.assign(document.createElement("div"), { textContent: words })));
}

function legend(id, names) {
  if ($(id).childElementCount) return;
  for (const name of names) {
    const swatch = document.createElement("i");
    swatch.className = `swatch ${name}`;
    $(id).append(swatch, name);
  }
}

// ---- one look ------------------------------------------------------------------------------------

function showTiers(found) {
  const rows = [...memoryTiers(found), ...storeTiers(found)].map(([name, className, share]) => {
    const line = document.createElement("div"), title = document.createElement("div");
    title.className = "legend";
    title.textContent = name;
    const bar = document.createElement("div"), fill = document.createElement("i");
    bar.className = "bar";
    fill.className = className;
    fill.style.width = `${100 * share}%`;
    bar.append(fill);
    line.append(title, bar);
    return line;
  });
  $("tiers").replaceChildren(...rows);
}

function memoryTiers(found) {
  return (found.quire_tier_pages || []).filter(([, pages]) => pages > 0).map(([labels, pages]) => {
    const same = (each) => each.tier === labels.tier && each.component === labels.component;
    const used = sum(found.quire_tier_used_pages, same), locked = sum(found.quire_tier_locked_pages, same);
    const name = `${labels.tier}${labels.component === "full" ? "" : ` (${labels.component})`}: ` +
      `${bytes(sum(found.quire_tier_used_bytes, same))} of ${bytes(sum(found.quire_tier_bytes, same))}, ` +
      `${used.toLocaleString()} of ${pages.toLocaleString()} pages, ${locked.toLocaleString()} in use now`;
    return [name, labels.tier, used / pages];
  });
}

function storeTiers(found) { // those that have a budget of their own
  const rows = found.quire_store_bytes || [];
  const of = (store, what) => sum(rows, (each) => each.store === store && each.what === what);
  const stores = [...new Set(rows.map(([labels]) => labels.store))].filter((store) => of(store, "max") > 0);
  return stores.map((store) => {
    const used = of(store, "used"), max = of(store, "max");
    const name = `store${stores.length > 1 ? ` ${store}` : ""}: ${bytes(used)} of ${bytes(max)}, with what others keep there`;
    return [name, "store", Math.min(1, used / max)];
  });
}

function remember(found, now) {
  const cached = (tier) => one(found.quire_cached_tokens_total, "tier", tier);
  const at = {
    now, device: cached("device") + cached("prefill_device"), host: cached("host") + cached("prefill_host"),
    store: cached("store") + cached("prefill_store"), peer: cached("peer"),
    prompt: sum(found.quire_prompt_tokens_total),
    computed: one(found.quire_engine_events_total, "event", "computed_prompt_tokens"),
    model_s: one(found.quire_engine_seconds_total, "what", "model"),
    first_s: sum(found.quire_time_to_first_token_seconds_sum),
    firsts: sum(found.quire_time_to_first_token_seconds_count),
    said: sum(found.quire_generated_tokens_total),
    gap_s: sum(found.quire_time_per_output_token_seconds_sum),
    gaps: sum(found.quire_time_per_output_token_seconds_count),
  };
  const before = past.last;
  past.last = at;
  if (!before || at.prompt < before.prompt || at.model_s < before.model_s) return; // it has started anew
  const seconds = Math.max(0.1, (now - before.now) / 1000);
  const rate = (name) => Math.max(0, at[name] - before[name]) / seconds;
  const hits = { device: rate("device"), host: rate("host"), store: rate("store"), peer: rate("peer") };
  hits.computed = Math.max(0, rate("prompt") - hits.device - hits.host - hits.store - hits.peer);
  past.hits.push(hits);
  // The best that was seen, less what saying took: what the cache spares is then rather understated.
  const computed = at.computed - before.computed, spent = at.model_s - before.model_s;
  const saying = at.gaps ? (at.said - before.said) * (at.gap_s / at.gaps) : 0;
  if (computed > 32) past.speed = Math.max(past.speed, computed / Math.max(spent - saying, spent / 10, 0.005));
  const firsts = at.firsts - before.firsts;
  if (firsts > 0) {
    const mean = (at.first_s - before.first_s) / firsts;
    const spared = (hits.device + hits.host + hits.store + hits.peer) * seconds / firsts;
    past.ttft.push({ with: mean, spared });
  } else past.ttft.push(null);
  for (const kept of [past.hits, past.ttft]) while (kept.length > KEPT) kept.shift();
}

// What the store's client counts, in words: as quire top says it.
const TROUBLES = {
  error: "Calls that failed", declined: "Calls not made", read: "Pages not read",
  written: "Pages not written", mismatch: "Pages that were wrong",
};

function showStore(found) {
  if (!sum(found.quire_store_attached)) { lines("store", ["none: what is cached ends with the server"]); return; }
  const events = Object.fromEntries((found.quire_store_events_total || []).map(([labels, value]) => [labels.event, value]));
  const bad = {};
  for (const name of Object.keys(events).sort()) {
    const [kind, what] = name.split(":");
    if (!events[name] || !(kind in TROUBLES) || ["ok", "miss", "cancelled"].includes(what)) continue;
    (bad[kind] ||= []).push(`${events[name].toLocaleString()} ${what.replaceAll("_", " ")}`);
  }
  const opened = events.breaker_opened || 0, stores = found.quire_store_answers || [];
  const silent = stores.filter(([, answers]) => !answers).map(([labels]) => labels.store);
  const which = stores.length > 1 ? `Store ${silent.join(", ")} does` : "Does";
  lines("store", [
    silent.length ? `${which} NOT answer: the breaker is open, it is asked again after a while` : "Answers",
    opened ? `Breaker: opened ${times(opened)} so far` : "Breaker: closed, and was never open",
    `${(events["read:ok"] || 0).toLocaleString()} pages read, ${(events["written:ok"] || 0).toLocaleString()} written`,
    ...Object.entries(bad).map(([kind, counts]) => `${TROUBLES[kind]}: ${counts.join(", ")}`),
    ...(Object.keys(bad).length ? [] : ["No failures"]),
  ]);
  $("store").firstChild.className = silent.length ? "bad" : "good";
}

function showFirsts() {
  const firsts = past.ttft.map((each) => each && { with: each.with, without: past.speed ? each.with + each.spared / past.speed : null });
  drawLines($("ttft"), firsts, KEPT, (KEPT * EVERY_MS) / 1000);
  const last = firsts.findLast((each) => each !== null);
  if (!last) { text("ttft-text", "no answer has begun since this page was opened"); return; }
  text("ttft-text", `With the cache ${last.with.toFixed(3)} s; without it ` + (past.speed
    ? `about ${last.without.toFixed(3)} s (estimated: ${Math.round(past.speed).toLocaleString()} prompt tokens per second computed here)`
    : "nobody knows: hardly anything was computed here since this page was opened"));
}

function showHandovers(found) {
  if (!found.quire_handovers_total) { text("handovers", "none: this server works alone"); return; }
  const count = sum(found.quire_handovers_total), spent = sum(found.quire_handover_seconds_total);
  const links = (found.quire_peer_link || []).map(([labels]) => `Peer ${labels.peer}: ${labels.state}`).join("; ");
  const failed = sum(found.quire_handovers_local_total);
  lines("handovers", [
    `${sum(found.quire_handovers_open)} under way, ${count.toLocaleString()} received` +
      (count ? `, ${((1000 * spent) / count).toFixed(0)} ms each` : ""),
    `${bytes(one(found.quire_handover_bytes_total, "direction", "received"))} in, ` +
      `${bytes(one(found.quire_handover_bytes_total, "direction", "sent"))} out`,
    failed ? `${failed.toLocaleString()} came to nothing: computed here instead` : "None came to nothing",
    links || "No peer so far",
  ]);
}

// ["running", "running", "waiting"] → "2 running, 1 waiting": of the same moment as the table below.
function inWords(states) {
  const counts = [...new Set(states)].sort().map((state) => `${states.filter((each) => each === state).length} ${state}`);
  return counts.join(", ") || "none";
}

function showRequests(found, answer) {
  text("flight", answer ? inWords(answer.requests.map((each) => each.state)) :
    `${sum(found.quire_running_requests)} running, ${sum(found.quire_waiting_requests)} waiting. ` +
    withKey("the requests one by one"));
  const rows = answer ? answer.requests.slice(0, 40).map((each) => row([each.id, each.state,
    `${each.prompt_tokens} in`, `${each.output_tokens} out`, `${each.age_s.toFixed(1)} s`])) : [];
  $("requests").replaceChildren(...(rows.length ? [row(["request", "state", "prompt", "answer", "age"], "th"), ...rows] : []));
}

function showTree(answer) {
  if (!answer) { text("tree-key", withKey("pictures of what is cached, where, how warm and whose")); return; }
  const runs = answer.runs.map((run) => Object.fromEntries(answer.fields.map((name, i) => [name, run[i]])));
  const rows = drawTree($("tree"), runs, $("tree").clientWidth || 600, (words) => text("run", words));
  legend("tree-tiers", TIERS.slice(0, 3));
  text("tree-key", `${runs.length.toLocaleString()} runs of pages on ${rows} branches, ${answer.page_size} tokens per page. ` +
    "Prompts go from left to right and part where they differ; colour: the fastest tier that has it; paler: longer " +
    "unused; ×: times used. Point at one, or tap it.");
}

function showMembers(health) {
  const rows = health.members.map((each) => {
    const link = Object.assign(document.createElement("a"), { href: `${each.url}/ui`, textContent: each.url });
    return row([link, each.side, `${each.state}${each.reason ? `: ${each.reason}` : ""}`,
      `${each.running} running`, `${each.waiting} waiting`, each.model]);
  });
  $("members").replaceChildren(row(["server", "kind", "state", "", "", "model"], "th"), ...rows);
}

// Clients' requests: who looks here asks as well.
function showRouted(found, members) {
  const open = members.filter((each) => each.side !== "prefill").reduce((total, each) => total + each.in_flight, 0);
  const asked = (found.quire_router_requests_total || []).filter(([labels]) => labels.endpoint.startsWith("/v1/"));
  const total = sum(asked), worse = sum(asked, (labels) => labels.status >= "500"), lost = sum(found.quire_router_failovers_total);
  const chosen = sum(found.quire_router_choices_total), known = one(found.quire_router_choices_total, "by", "affinity");
  lines("routed", [
    `${open.toLocaleString()} under way, ${total.toLocaleString()} answered, ${worse.toLocaleString()} of them failed (5xx)`,
    `${known.toLocaleString()} of ${chosen.toLocaleString()} choices of a server for what it has cached`,
    `${sum(found.quire_router_retries_total).toLocaleString()} tries that another server could make good, ` +
      `${lost.toLocaleString()} streams whose server was lost on the way`,
  ]);
}

async function look() {
  const health = await fetch("/health", { cache: "no-store", headers: SHARED }).then((answer) => answer.json());
  const isRouter = "members" in health;
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = (part.dataset.for === "router") !== isRouter;
  const isWell = health.status === "ok";
  text("state", health.draining ? "draining" : isWell ? "serving" : "not serving");
  $("state").className = `pill ${isWell && !health.draining ? "good" : "bad"}`;
  text("model", isRouter ? "router" : `${health.model || ""} ${health.role || ""}`);
  const answer = await ask("/metrics", { headers: SHARED });
  const at = performance.now() - 1000 * Number(answer.headers.get("x-quire-age"));
  const found = metrics(await answer.text());
  if (isRouter) { showMembers(health); showRouted(found, health.members); return; }
  const [requests, tree] = await Promise.all([admin("/admin/requests"), admin("/admin/tree")]);
  remember(found, at);
  showTiers(found);
  showStore(found);
  showHandovers(found);
  if (requests !== undefined) showRequests(found, requests);
  if (tree !== undefined) showTree(tree);
  drawHits($("hits"), past.hits, KEPT, (KEPT * EVERY_MS) / 1000);
  legend("hits-key", TIERS);
  showFirsts();
}

async function forever() {
  for (;;) {
    if (!document.hidden) {
      try {
        await look();
        $("trouble").hidden = true;
      } catch (error) {
        $("trouble").hidden = false;
        text("trouble", `The server does not answer: it is asked again. (${error.message})`);
        text("state", "gone");
        $("state").className = "pill bad";
      }
    }
    document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

// ---- the chat box --------------------------------------------------------------------------------

const said = []; // the conversation so far

// Server-sent events → the JSON of each.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

async function chat(event) {
  event.preventDefault();
  const words = $("say").value.trim();
  if (!words) return;
  const messages = [...said, { role: "user", content: words }];
  const headers = { "content-type": "application/json", ...keyed("api-key") };
  const post = (path, body) => ask(path, { method: "POST", headers, body: JSON.stringify(body) });
  text("answer", "…");
  text("cost", "");
  try {
    const model = (await (await ask("/v1/models", { headers })).json()).data[0].id;
    const { tokens } = await (await post("/tokenize", { model, messages })).json();
    const began = performance.now();
    const body = { model, messages, max_tokens: 96, stream: true, stream_options: { include_usage: true } };
    let answer = "", first = null, usage = null;
    for await (const each of events(await post("/v1/chat/completions", body))) {
      if (each.error) throw new Error(each.error.message);
      usage = each.usage || usage;
      const piece = each.choices[0]?.delta.content;
      if (!piece) continue;
      first ??= (performance.now() - began) / 1000;
      text("answer", (answer += piece));
    }
    said.splice(0, said.length, ...messages, { role: "assistant", content: answer });
    const { cached_tokens_by_tier: here, cached_tokens_at_prefill: there } = usage.prompt_tokens_details;
    const cached = (tier) => (here?.[tier] || 0) + (there?.[tier] || 0);
    const spans = [], found = [];
    let at = 0;
    for (const tier of TIERS) {
      const count = tier === "computed" ? tokens.length - at : cached(tier);
      if (count <= 0) continue;
      const { prompt } = await (await post("/detokenize", { model, tokens: tokens.slice(at, at + count) })).json();
      spans.push(Object.assign(document.createElement("span"),
        { className: tier, title: `${tier}: ${count} tokens`, textContent: prompt }));
      found.push(tier === "computed" ? `${count} computed` : `${count} from ${tier}`);
      at += count;
    }
    legend("chat-tiers", TIERS);
    $("prompt").replaceChildren(...spans);
    text("cost", `${usage.prompt_tokens} prompt tokens: ${found.join(", ")}. First token after ` +
      `${(first ?? 0).toFixed(2)} s, whole answer after ${((performance.now() - began) / 1000).toFixed(2)} s.`);
  } catch (error) {
    text("answer", `It did not work: ${error.message}`);
  }
}

$("over").addEventListener("click", () => {
  said.length = 0;
  for (const id of ["prompt", "answer", "cost"]) text(id, "");
});
for (const id of ["admin-key", "api-key"]) {
  $(id).value = sessionStorage.getItem(id) || "";
  $(id).addEventListener("change", () => sessionStorage.setItem(id, $(id).value));
}
$("keys").addEventListener("submit", (event) => event.preventDefault());
$("chat").addEventListener("submit", chat);
forever();
