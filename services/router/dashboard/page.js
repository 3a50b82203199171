// Asks the router for its state once a second and shows it. Names from the cluster are only
// ever set as text.
import { Timeline } from "/dashboard/timeline.js";

const POLL_MS = 1000, STALE_MS = 4000;
const POOLS = [["prompt", "Prompt pool"], ["mixed", "Mixed pool"], ["token", "Token pool"]];
const byId = (id) => document.getElementById(id);

let state = null, heardAt = 0, offset = 0, paused = false, pausedAt = 0, pickedOutcome = "";

// ---- small helpers

function make(tag, { text, className, title, data, style } = {}, ...children) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  if (title) node.title = title;
  Object.assign(node.dataset, data ?? {});
  Object.assign(node.style, style ?? {});
  node.append(...children);
  return node;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(share > 0.995 && share < 1 ? 1 : 0)} %`;

function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return `${(ms / 1e3).toFixed(ms < 9995 ? 2 : 1)} s`;
}

function large(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)}${unit}`;
  }
  return value < 10 && value % 1 ? value.toFixed(1) : `${Math.round(value)}`;
}

// ---- asking

async function ask(path) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (response.status === 401) byId("key-form").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  byId("key-form").hidden = true;
  return response.json();
}

async function poll() {
  try {
    state = await ask("/dashboard/state");
    heardAt = performance.now();
    offset = state.now_ms - Date.now();
    show();
  } catch (error) {
    console.info("no state:", error.message);
  }
  showStatus();
  setTimeout(poll, POLL_MS);
}

function showStatus() {
  const silence = performance.now() - heardAt;
  const lost = state !== null && silence > STALE_MS;
  const status = byId("status");
  status.dataset.status = state === null ? "waiting" : lost ? "lost" : "live";
  const label = lost ? `no word from the router for ${Math.round(silence / 1e3)} s` : "live";
  status.textContent = state === null ? "connecting" : label;
  byId("main").classList.toggle("stale", lost);
}

// ---- showing

function show() {
  const serving = state.models.map((model) => model.serving ? model.name : `${model.name} (not served)`);
  byId("cluster").textContent =
    `${plural(state.machines.length, "machine")} · ${serving.join(", ") || "no model"} · policy ${state.policy || "–"}`;
  for (const node of document.querySelectorAll(".window")) node.textContent = `last ${Math.round(state.window_s)} s`;
  showFigures();
  showLatency();
  showTransfers();
  showPools();
  if (!paused) timeline.update(state.machines, state.requests);
  const picked = state.requests.find((request) => request.request_id === timeline.chosen);
  if (picked && picked.outcome !== pickedOutcome) pick(picked);  // it is over now
}

function showFigures() {
  const { counters, rates } = state;
  const figures = [
    ["running", large(state.running)],
    ["waiting", large(state.queued)],
    ["requests/s", large(rates.requests_per_s)],
    ["prompt tokens/s", large(rates.prompt_tokens_per_s)],
    ["output tokens/s", large(rates.output_tokens_per_s)],
    ["finished", large(counters.finished ?? 0)],
    ["restarted", large(counters.restarted ?? 0)],
    ["refused", large(counters.rejected ?? 0)],
    ["failed", large(counters.failed ?? 0), (counters.failed ?? 0) > 0],
  ];
  const { budget_watts: budget, enforced_watts: limits, missing_watts: missing } = state.power;
  if (limits) figures.push(["power limits", `${large(limits)}W${budget ? ` / ${large(budget)}W` : ""}`, (missing ?? 0) > 0]);
  byId("figures").replaceChildren(...figures.map(([name, value, alarm]) =>
    make("div", { className: alarm ? "figure alarm" : "figure" }, make("b", { text: value }), make("span", { text: name }))));
}

function rows(id, list) {
  byId(id).tBodies[0].replaceChildren(...list.map((cells) => make("tr", {}, ...cells)));
}

function showLatency() {
  rows("latency", state.latency.map((row) => {
    const target = row.target_p90_ms;
    const verdict = target === null || row.p90 === null ? "" : row.p90 <= target ? "met" : "missed";
    return [
      make("td", { text: row.name }), make("td", { text: duration(row.p50) }),
      make("td", { text: duration(row.p90), className: verdict }), make("td", { text: duration(row.p99) }),
      make("td", { text: duration(target) }), make("td", { text: row.count }),
    ];
  }));
}

function showTransfers() {
  rows("transfers", state.transfers.map((row) => {
    const share = row.hidden_share;
    const bar = make("div", { className: share === null ? "split none" : "split" },
      make("i", {}, make("b", { style: { width: `${100 * (share ?? 0)}%` } })),
      make("span", { text: share === null ? "–" : percent(share) }));
    return [
      make("td", { text: row.mode }),
      make("td", { text: row.open_exposed ? `${row.open}, ${row.open_exposed} exposed` : row.open,
        className: row.open_exposed ? "exposed" : "", title: "pushes under way; exposed: the first token is out" }),
      make("td", { text: row.count }), make("td", { text: `${large(row.bytes)}B` }),
      make("td", { text: duration(row.push[50]) }), make("td", { text: duration(row.exposed[50]) }),
      make("td", { text: duration(row.exposed[99]) }), make("td", { className: "wide" }, bar),
    ];
  }));
}

function poolNode(pool, title) {
  const machines = state.machines.filter((machine) => machine.pool === pool)
    .sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  const deepest = Math.max(2048, ...state.machines.map((machine) => machine.pending_prompt_tokens));
  const used = machines.reduce((sum, machine) => sum + machine.kv_used, 0);
  const total = machines.reduce((sum, machine) => sum + machine.kv_total, 0);
  const watts = machines.reduce((sum, machine) => sum + machine.power_watts, 0);
  const facts = [machines.length, total && `KV ${percent(used / total)}`, watts && `${large(watts)}W`].filter(Boolean).join(" · ");
  const node = make("section", { className: "pool", data: { pool } },
    make("h2", {}, make("span", { text: title }), make("small", { text: facts })));
  if (!machines.length) {
    const empty = pool === "mixed" ? "No machine is borrowed." : "No machine.";
    node.append(make("p", { className: "hint", text: empty }));
  }
  node.append(make("div", { className: "machines" }, ...machines.map((machine) => machineNode(machine, deepest))));
  return node;
}

// A pool of many machines gets the width of several, in steps, so that a borrowed machine moves nothing.
function showPools() {
  const widths = POOLS.map(([pool]) => state.machines.filter((machine) => machine.pool === pool).length)
    .map((count) => `minmax(0, ${Math.min(4, Math.max(1, Math.ceil(count / 15)))}fr)`);
  byId("pools").style.setProperty("--widths", widths.join(" "));
  byId("pools").replaceChildren(...POOLS.map(([pool, title]) => poolNode(pool, title)));
}

function gauge(kind, share, label, title) {
  const full = kind === "kv" && share > 0.95 ? " full" : "";
  return make("div", { className: `gauge ${kind}${full}`, title },
    make("i", { style: { width: `${Math.min(100, 100 * share)}%` } }), make("span", { text: label }));
}

function machineNode(machine, deepest) {
  const share = machine.kv_total ? machine.kv_used / machine.kv_total : 0;
  const running = machine.token_requests - machine.token_waiting;
  const power = machine.power_limit_watts
    ? `; GPUs draw ${large(machine.power_watts)}W of ${large(machine.power_limit_watts)}W (${machine.power_reason})` : "";
  const node = make("div", { className: "machine", data: { home: machine.home, state: machine.state, machine: machine.id } },
    make("div", { className: "name", text: machine.id, title: `${machine.id} on ${machine.node}, ${machine.engine}${power}` }),
    gauge("queue", machine.pending_prompt_tokens / deepest,
      `queue ${large(machine.pending_prompt_tokens)}`,
      `${machine.pending_prompt_tokens} prompt tokens waiting; ${plural(machine.prompt_requests, "request")} in the prompt phase`),
    gauge("kv", share, `KV ${percent(share)}`, `${machine.kv_used} of ${machine.kv_total} blocks`),
    make("div", { className: "batch", text: `batch ${running}${machine.token_waiting ? ` + ${machine.token_waiting}` : ""}`,
      title: `${running} in the token phase, ${machine.token_waiting} waiting for it; ${machine.preemptions} preemptions since start` }));
  const note = noteOf(machine);
  if (note) {
    node.append(make("div", { className: "note" },
      make("span", { className: `badge ${machine.state}`, text: machine.state }), make("span", { text: ` ${note}` })));
  }
  return node;
}

function noteOf(machine) {
  if (machine.state === "lost") return `no word for ${duration(machine.report_age_ms)}`;
  if (machine.state === "draining") return machine.pool_reason || "finishes its work and takes no new";
  if (machine.pool !== machine.home) return `from the ${machine.home} pool: ${machine.pool_reason || "no reason given"}`;
  return machine.state === "serving" ? "" : machine.pool_reason || "not serving yet";
}

// ---- one request

function facts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) {
    if (value !== undefined) list.append(make("dt", { text: name }), make("dd", { text: value }));
  }
  return list;
}

const us = (value) => value === undefined ? undefined : duration(value / 1e3);

async function pick(request) {
  timeline.chosen = request.request_id;
  pickedOutcome = request.outcome;
  const { transfer } = request;
  const detail = byId("detail");
  detail.replaceChildren(make("h3", { text: request.request_id }), facts([
    ["outcome", request.outcome], ["model", request.model],
    ["tokens", `${request.prompt_tokens ?? 0} in (${request.cached_prompt_tokens ?? 0} cached), ${request.output_tokens ?? 0} out`],
    ["prompt machine", request.prompt_machine], ["token machine", request.token_machine],
    ["why", request.reason], ["waited", us(request.queued_us)], ["TTFT", us(request.ttft_us)],
    ["second token", us(request.second_us)], ["TBT", us(request.tbt_mean_us)], ["E2E", us(request.e2e_us)],
    ["restarts", request.restarts],
    ["transfer", transfer && `${large(transfer.bytes)}B ${transfer.mode} over ${transfer.transport}`],
    ["push", transfer && `${us(transfer.push_us)}, exposed ${us(transfer.exposed_us)}`],
  ]));
  try {
    const explanation = await ask(`/dashboard/requests/${encodeURIComponent(request.request_id)}`);
    detail.append(...explanation.decisions.flatMap(decisionNodes));
  } catch (error) {
    detail.append(make("p", { className: "hint", text: error.message }));
  }
}

function decisionNodes(decision) {
  const nodes = [make("h3", { text: `${decision.kind} after ${us(decision.at_us)}: ${decision.reason}` })];
  if (decision.candidates.length) {
    const body = make("tbody", {}, ...decision.candidates.map((seen) =>
      make("tr", { className: seen.chosen ? "chosen" : "" }, make("td", { text: seen.machine }),
        make("td", { text: seen.phase }), make("td", { text: seen.pool }), make("td", { text: large(seen.queue_tokens) }),
        make("td", { text: seen.kv_total ? percent(seen.kv_used / seen.kv_total) : "–",
          title: `${seen.kv_used} of ${seen.kv_total} KV blocks in use or promised; ${seen.cached_tokens} prompt tokens thought to be cached` }))));
    const head = make("tr", {}, ...["machine", "phase", "pool", "queue", "KV"].map((text) => make("th", { text })));
    nodes.push(make("table", {}, make("thead", {}, head), body));
  }
  return nodes;
}

// ---- start

const timeline = new Timeline(byId("timeline"), pick);
byId("span").addEventListener("change", (event) => { timeline.spanMs = 1e3 * event.target.value; });
byId("pause").addEventListener("click", (event) => {
  paused = !paused;
  pausedAt = Date.now() + offset;
  event.target.setAttribute("aria-pressed", paused);
  event.target.textContent = paused ? "Go on" : "Pause";
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  timeline.chosen = null;
  byId("detail").replaceChildren(make("p", { className: "hint", text: "Click a request to see where it ran and why." }));
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key").value);
});
setInterval(() => {
  showStatus();
  if (state !== null && !document.hidden) timeline.draw(paused ? pausedAt : Date.now() + offset);
}, 250);
poll();
