// Everything beside the timeline: tiles, memory, pushes, requests, errors.

import { ago, byId, bytes, count, counted, duration, element, percent, share, swatch, write } from "./format.js";

const LIFECYCLES = {
  starting: ["Starting: the model is being loaded", "warn"],
  running: ["Running", "good"],
  paused: ["Paused", "warn"],
  asleep: ["Asleep", "warn"],
  weights_missing: ["Weights missing", "bad"],
  shutting_down: ["Ending", "bad"],
};
const MEMORY = {
  process: "Process",
  weights: "Weights",
  kept_base: "Base below an adapter",
  workspace: "Workspace",
  tower_workspace: "Vision tower",
  embeddings: "Image embeddings",
  requests: "Requests and replies",
  kv_cache: "KV cache",
  adapters: "Adapters",
  merged_adapter: "Merged adapter",
  base_copies: "Base copies",
  update_staging: "Push that arrives",
  spare_weights: "Spare weights",
  context: "Context of the device",
  page_rounding: "Whole pages",
  copy_buffers: "Copy buffers",
  offloaded: "Weights asleep",
};
const TRANSPORTS = {
  inline: "inline",
  shared_memory: "by shared memory",
  directory: "from a directory",
  device_memory: "from device memory",
  broadcast: "by broadcasts",
};

export function lifecycle(state) {
  return LIFECYCLES[state] ?? [state, "warn"];
}

export function heading(server, state, now) {
  write("model", server.model ?? "rollout-server");
  const [words, className] = lifecycle(state);
  write("lifecycle", words);
  byId("lifecycle").className = `pill ${className}`;
  const facts = [`rollout-server ${server.version}`];
  if (server.model) {
    facts.push(server.architecture, server.dtype, `${server.device}, ${server.kernel}`);
    if (server.tensor_parallel_size > 1) facts.push(`tp ${server.tensor_parallel_size}`);
    const { parameters: n } = server;
    facts.push(n < 1e6 ? counted(n, "parameter") : `${count(n / 1e6)} M parameters`, `context ${count(server.max_model_len)}`);
  }
  facts.push(`up ${duration(now / 1e9)}`);
  write("facts", facts.join(" · "));
  document.title = `${words.split(":")[0]} · ${server.model ?? "rollout-server"}`;
}

export function unreachable() {
  write("lifecycle", "Not reachable");
  byId("lifecycle").className = "pill bad";
  document.title = "Not reachable · rollout-server";
}

// What the engine does now, with the samples that it does it for.
export function present(phase, engine) {
  if (engine.accepted_requests + engine.held_requests === 0) return phase;
  const requests = counted(engine.accepted_requests + engine.held_requests, "request");
  return `${phase}, ${counted(engine.running_samples, "sample")} of ${requests} in the batch`;
}

export function tiles(engine, server) {
  const waiting = `${count(engine.waiting_samples)} wait`;
  big("samples", count(engine.running_samples), server.max_num_seqs ? `of ${count(server.max_num_seqs)} run` : "run");
  const held = engine.held_requests > 0 ? ` · ${counted(engine.held_requests, "request")} held` : "";
  write("samples-more", `${waiting} · ${counted(engine.accepted_requests, "request")}${held}`);

  const { total_blocks: total, free_blocks: free, cached_blocks: cached } = engine;
  const used = total - free;
  big("kv", percent(share(used, total)), "in use");
  bar("kv-bar", [["used", share(used, total), "var(--decode)"], ["cached", share(cached, total), "var(--prefill)"]]);
  write("kv-more", `${percent(share(cached, total))} keeps prefixes · ${count(total)} blocks`);

  big("hits", percent(share(engine.cached_tokens, engine.prompt_tokens)), "of prompt tokens");
  const more = [`${count(engine.cached_tokens)} of ${count(engine.prompt_tokens)} found`];
  if (engine.preemptions > 0) more.push(counted(engine.preemptions, "preemption"));
  write("hits-more", more.join(" · "));
  images(engine);

  const { drafts, drafted_tokens: drafted, accepted_tokens: accepted } = engine;
  big("drafts", drafted > 0 ? percent(share(accepted, drafted)) : "–", "accepted");
  write(
    "drafts-more",
    drafts > 0 ? `of ${counted(drafted, "draft token")} · ${(accepted / drafts).toFixed(1)} per draft` : "No drafts yet.",
  );
}

// A model of text alone has no room for embeddings.
function images({ embedding_capacity: capacity, held_embeddings: held, ...engine }) {
  for (const id of ["embeddings-card", "encodes-card"]) byId(id).hidden = capacity === 0;
  if (capacity === 0) return;
  big("embeddings", percent(share(held, capacity)), "in use");
  bar("embeddings-bar", [["held", share(held, capacity), memoryColor("embeddings")]]);
  write("embeddings-more", `${counted(engine.held_images, "image")} · ${count(held)} of ${counted(capacity, "token")}`);

  const { encoded_images: encoded, queried_images: needed, reused_images: reused } = engine;
  big("encodes", needed > 0 ? percent(reused / needed) : "–", "found encoded");
  write("encodes-more", `${count(reused)} of ${count(needed)} found · ${count(encoded)} encoded`);
}

// The median of a latency, and the 99th percentile.
export function latency(name, { isWhole, values: [median, highest] }, shown) {
  big(name, median === null ? "–" : duration(median), "median");
  const words = isWhole ? "since the start" : `in the last ${shown}`;
  write(`${name}-more`, median === null ? `No tokens ${words}.` : `99th percentile ${duration(highest)} · ${words}`);
}

// The requests that have ended, by how.
// The last work that the watchdog has reported.
export function stall(found) {
  byId("stall").hidden = found === null;
  if (found === null) return;
  const { at, phase, push, seconds, is_over: isOver } = found;
  const what = push === null ? `The engine (${phase})` : `Push ${push} (${phase})`;
  const time = new Date(at).toLocaleTimeString();
  write(
    "stall",
    isOver
      ? `${what} made no progress for ${duration(seconds)} around ${time}; the log has the stack of each thread.`
      : `${what} makes no progress, reported at ${time} after ${duration(seconds)}; the log has the stack of each thread.`,
  );
}

// Shares by format, once a sample has had a call.
export function toolCalls(formats) {
  const all = Object.entries(formats);
  byId("calls-card").hidden = all.length === 0;
  const sum = (name) => all.reduce((sum, [, calls]) => sum + calls[name], 0);
  const [parsed, malformed] = [sum("parsed"), sum("malformed")];
  big("calls", percent(share(parsed, parsed + malformed)), "parsed");
  const more = all.map(([format, { parsed, malformed }]) => `${format}: ${count(malformed)} of ${count(parsed + malformed)} malformed`);
  write("calls-more", more.join(" · "));
}

export function outcomes({ finished = 0, aborted = 0, ...failed }) {
  const kinds = Object.entries(failed).sort((a, b) => b[1] - a[1]);
  const sum = kinds.reduce((all, [, n]) => all + n, 0);
  big("failures", count(sum), `of ${counted(finished + aborted + sum, "request")}`);
  if (aborted > 0) kinds.push(["aborted", aborted]);
  write("failures-more", kinds.map(([kind, n]) => `${count(n)} ${kind.replaceAll("_", " ")}`).join(" · ") || "None.");
}

// The marks of pushes in the timeline, for people who do not see it.
export function pushEnds(ends) {
  const failed = ends.filter(({ version }) => version === null).length;
  const applied = ends.filter(({ version }) => version !== null).map(({ version }) => `version ${version}`);
  const parts = [...applied, ...(failed > 0 ? [`${count(failed)} failed`] : [])];
  return parts.length > 0 ? `Pushes: ${parts.join(", ")}.` : "";
}

export function rate(now, mean, shown, engine) {
  big("rate", count(now.sampled), "sampled");
  write("rate-more", `${count(mean.sampled)} in the mean of ${shown} · ${count(engine.generated_tokens)} in all`);
}

function big(id, number, words) {
  if (byId(id).textContent !== `${number} ${words}`) byId(id).replaceChildren(`${number} `, element("small", "", words));
}

function bar(id, parts) {
  byId(id).replaceChildren(
    ...parts.map(([title, part, color]) => {
      const made = element("div");
      made.title = title;
      made.style.width = `${part * 100}%`;
      made.style.background = color;
      return made;
    }),
  );
}

function memoryColor(name) {
  return `var(--m${Math.max(0, Object.keys(MEMORY).indexOf(name))})`;
}

export function memory({ total, ceiling, entries, host, resident, under_way: underWay }) {
  const reserved = entries.reduce((sum, entry) => sum + entry[1], 0);
  // Beside a device with memory of its own the process' resident memory is another one.
  const whole = Math.max(ceiling, reserved, host ? 0 : resident, 1);
  byId("resident").hidden = Boolean(host);
  bar("memory-bar", entries.map(([name, size]) => [MEMORY[name] ?? name, size / whole, memoryColor(name)]));
  byId("resident").style.left = `${(resident / whole) * 100}%`;
  byId("resident").title = `resident: ${bytes(resident)}`;
  write("memory-sum", `${bytes(reserved)} reserved of ${bytes(ceiling)}`);
  write(
    "memory-note",
    `The bar is the ceiling${total > 0 ? `, ${percent(ceiling / total)} of ${bytes(total)}` : ""}. ` +
      (host ? hostNote(host, resident) : `The mark is what the process really holds: ${bytes(resident)}.`) +
      ` Requests under way take ${bytes(underWay)}.`,
  );
  byId("memory").replaceChildren(
    ...entries.map(([name, size]) =>
      element("li", "", swatch(memoryColor(name)), element("span", "", MEMORY[name] ?? name), element("span", "num", bytes(size))),
    ),
  );
}

// The ledger of the host's memory, in words.
function hostNote({ ceiling, entries }, resident) {
  const parts = entries.map(([name, size]) => `${MEMORY[name] ?? name} ${bytes(size)}`);
  return `Of the host's memory, at most ${bytes(ceiling)}: ${parts.join(", ")}; the process holds ${bytes(resident)}.`;
}

// A table anew: names of columns, each with its class, and rows of cells.
function table(id, columns, rows, none) {
  if (rows.length === 0) {
    byId(id).replaceChildren(element("tbody", "", element("tr", "", element("td", "none", none))));
    return;
  }
  const head = columns.map(([name, className]) => {
    const cell = element("th", className, name);
    cell.scope = "col";
    return cell;
  });
  const body = rows.map((cells) =>
    element("tr", "", ...cells.map((cell, i) => element("td", columns[i][1], ...[cell].flat()))),
  );
  byId(id).replaceChildren(element("thead", "", element("tr", "", ...head)), element("tbody", "", ...body));
}

// Time since a moment in milliseconds since 1970, which refreshAges() keeps right.
function since(at, words) {
  const made = element("time", "");
  made.dateTime = new Date(at).toISOString();
  made.title = new Date(at).toLocaleString();
  made.dataset.at = at;
  made.dataset.words = words;
  return made;
}

export function refreshAges(unixMs) {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const seconds = Math.max(0, (unixMs - Number(time.dataset.at)) / 1000);
    const words = time.dataset.words === "ago" ? ago(seconds) : duration(Math.max(seconds, 0.1));
    if (time.textContent !== words) time.textContent = words;
  }
}

export function pushes(list, engine) {
  write("version", `version ${engine.weight_version} · ${counted(engine.updates, "push", "pushes")}`);
  const columns = [
    ["When", "num"],
    ["Push", ""],
    ["Version", "num"],
    ["Bytes", "num"],
    ["Pause", "num"],
    ["Outcome", "text wide"],
    ["Digest", "minor mono"],
  ];
  const rows = list.map((push) => {
    const digest = element("span", "", push.digest.slice(0, 8));
    digest.title = push.digest;
    const failed = push.error && element("span", "failed", failure(push.error));
    return [
      since(push.at, "ago"),
      push.adapter === null ? push.kind : `${push.kind} ${push.adapter}`,
      push.version === null ? "–" : String(push.version),
      push.bytes > 0 ? bytes(push.bytes) : "–",
      push.pause === null ? "–" : duration(push.pause),
      failed ?? `applied, received in ${duration(push.staging)} ${TRANSPORTS[push.transport] ?? push.transport}`,
      push.bytes > 0 ? digest : "–",
    ];
  });
  table("pushes", columns, rows, "No push yet: the checkpoint serves.");
}

// An error in words. Who may see only own requests is told the kind alone.
function failure({ kind, message }) {
  return message ?? kind.replaceAll("_", " ");
}

export function requests({ total, oldest }) {
  write("requests-sum", total > oldest.length ? `the oldest ${oldest.length} of ${count(total)}` : count(total));
  const columns = [
    ["Id", "text wide mono"],
    ["State", ""],
    ["Prompts", "num minor"],
    ["Samples", "num"],
    ["Tokens", "num"],
    ["Age", "num"],
  ];
  const rows = oldest.map((request) => [
    request.id ?? "of another token",
    request.progress,
    count(request.prompts),
    request.samples === 0 ? "score" : `${count(request.samples - request.open_samples)} of ${count(request.samples)}`,
    count(request.tokens),
    since(request.began, "age"),
  ]);
  table("requests", columns, rows, "None.");
}

// Shown once a request has named a tenant.
export function tenants(list) {
  byId("tenants-card").hidden = list.length === 0;
  write("tenants-sum", count(list.length));
  const columns = [
    ["Tenant", "text wide mono"],
    ["Run", "num"],
    ["Wait", "num"],
    ["KV blocks", "num"],
    ["Prompt tokens", "num"],
    ["Sampled", "num"],
  ];
  const rows = list.map((tenant) => [
    tenant.name === "" ? "–" : tenant.name,
    ...[tenant.running, tenant.waiting, tenant.kv_blocks, tenant.prompt_tokens, tenant.generated_tokens].map(count),
  ]);
  table("tenants", columns, rows, "None.");
}

export function errors(list) {
  write("errors-sum", list.length === 0 ? "" : `the last ${list.length}`);
  const columns = [["When", "num"], ["Error", "text wide"], ["Request", "text minor mono"]];
  const rows = list.map(({ at, error, request }) => [
    since(at, "ago"),
    [element("span", "failed", error.kind.replaceAll("_", " ")), error.message === null ? "" : ` ${error.message}`],
    request ?? "–",
  ]);
  table("errors", columns, rows, "None.");
}
