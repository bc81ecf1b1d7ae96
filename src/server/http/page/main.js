// The page: puts together what the feed brings, and shows it.

import { Feed } from "./feed.js";
import { byId, duration, write } from "./format.js";
import { Latencies } from "./latencies.js";
import * as panels from "./panels.js";
import { Timeline } from "./timeline.js";

const TOKEN = "rollout-token";
const HINT = byId("span").textContent;

const timeline = new Timeline();
const latencies = new Latencies();
let state = {};
let isDrawing = false;
let pointer = null;

const feed = new Feed(take, report);

function take(event) {
  if (event.server && event.server.started !== state.server?.started) {
    timeline.clear();
    latencies.clear();
    state = {};
  }
  if (event.server) timeline.phases = event.server.phases;
  timeline.take(event.now, event.spans);
  if (event.latencies) latencies.take(event.now, event.latencies);
  const { now, spans, ...members } = event;
  Object.assign(state, members);
  for (const name of Object.keys(members)) refresh(name);
  draw();
}

// Shows a member of the state that has changed.
function refresh(name) {
  const { server, engine } = state;
  if (name === "engine" || name === "server") {
    if (engine && server) panels.tiles(engine, server);
  } else if (name === "memory") {
    panels.memory(state.memory);
  } else if (name === "requests") {
    panels.requests(state.requests);
  } else if (name === "outcomes") {
    panels.outcomes(state.outcomes);
  } else if (name === "tool_calls") {
    panels.toolCalls(state.tool_calls);
  } else if (name === "tenants") {
    panels.tenants(state.tenants);
  } else if (name === "stall") {
    panels.stall(state.stall);
  } else if (name === "errors") {
    panels.errors(state.errors);
  }
  if ((name === "pushes" || name === "engine") && state.pushes && engine) panels.pushes(state.pushes, engine);
}

// Shows what changes with the time, once for all events that have come together.
function draw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const { server, engine } = state;
    if (!server || !engine) return;
    byId("board").hidden = false;
    panels.heading(server, engine.lifecycle, timeline.now);
    panels.refreshAges(server.started + timeline.now / 1e6);
    write("headline", timeline.sentence());
    write("now", `Now: ${panels.present(timeline.present(), engine)}`);
    timeline.tables();
    timeline.draw(byId("chart"));
    const shown = duration((timeline.now - timeline.from) / 1e9);
    panels.rate(timeline.rate(), timeline.rate(timeline.from), shown, engine);
    for (const name of ["first_token", "next_token"]) {
      panels.latency(name, latencies.quantiles(name, timeline.from, [0.5, 0.99]), shown);
    }
    write("push-ends", panels.pushEnds(timeline.pushEnds()));
    point();
  });
}

function point() {
  const { width } = byId("chart").getBoundingClientRect();
  write("span", (pointer && timeline.describe(pointer.x, pointer.y, width)) || HINT);
}

// Says what has become of the feed.
function report({ kind, since, why, retry, hadToken, message }) {
  const isLive = kind === "live";
  byId("board").classList.toggle("stale", kind === "lost");
  byId("notice").hidden = isLive || kind === "refused";
  write("feed", isLive ? "Live, twice a second while this tab is seen." : "");
  byId("forget").hidden = sessionStorage.getItem(TOKEN) === null;
  if (kind === "lost") {
    panels.unreachable();
    const at = since.toLocaleTimeString();
    write("notice", `${why ?? "The server is not reachable"}: nothing new since ${at}. Tries again in ${duration(retry / 1000)}.`);
  }
  byId("ask").hidden = kind !== "refused";
  if (kind === "refused") {
    byId("board").hidden = true;
    write("ask-why", hadToken ? `The server refuses this token: ${message}` : "This server wants a token.");
    byId("token").focus();
  }
}

function follow() {
  if (document.hidden) {
    feed.stop();
  } else {
    feed.start(sessionStorage.getItem(TOKEN) ?? "");
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    write("ask-why", "A token is of printable ASCII characters without spaces.");
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  follow();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload();
});

byId("windows").addEventListener("change", (event) => {
  timeline.seconds = Number(event.target.value);
  draw();
});

byId("chart").addEventListener("pointermove", (event) => {
  pointer = { x: event.offsetX, y: event.offsetY };
  point();
});
byId("chart").addEventListener("pointerdown", (event) => {
  pointer = { x: event.offsetX, y: event.offsetY };
  point();
});
byId("chart").addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse") pointer = null;
});

// A tab that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", follow);
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
follow();
