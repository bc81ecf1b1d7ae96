// The engine's and the pushes' spans: kept, summed up, put into a sentence, drawn.

import { byId, bytes, count, counted, duration, element, percent, share, swatch } from "./format.js";

export const SECOND = 1e9; // Times are nanoseconds since the server's start.
export const KEEP_SECONDS = 15 * 60;
const RATE_SECONDS = 3;

// What each phase is called, and what it means where the engine does not compute.
const PHASES = {
  decode: { label: "Decode", works: true },
  prefill: { label: "Prefill", works: true },
  mixed: { label: "Prefill and decode", works: true },
  idle: { label: "No requests", why: "no requests" },
  wait_version: { label: "Waits for a newer policy", why: "requests wait for a newer policy" },
  wait_adapter: { label: "Waits for an adapter", why: "requests wait for an adapter to be loaded" },
  wait_readers: { label: "Waits for readers", why: "readers lag behind" },
  paused: { label: "Paused", why: "paused" },
  asleep: { label: "Asleep", why: "asleep" },
  weights_missing: { label: "Weights missing", why: "weights missing until a complete push" },
  push_reserve: { label: "Makes room for a push", why: "making room for pushes" },
  push_apply: { label: "Applies a push", why: "applying pushes" },
  sleep: { label: "Gives memory back", why: "giving memory back" },
  wake: { label: "Wakes", why: "waking" },
  reload: { label: "Reloads the checkpoint", why: "reloading the checkpoint" },
  checksum: { label: "Checksum", why: "checksums" },
  load: { label: "Loads the model", why: "loading the model" },
  brief: { label: "Other, briefly", why: "other work" },
  push_receive: { label: "Receives" },
  push_verify: { label: "Verifies" },
  push_commit: { label: "Commits" },
};
const BRIEF_PARTS = ["prefill", "decode", "mixed", "idle"];

function color(phase) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${phase}`);
}

// Consecutive spans of one track.
class Track {
  spans = [];

  // Takes new spans, and those that were open when they came the last time.
  take(rows, phases) {
    for (const row of rows) {
      const [id, phase, start, end, sampled, computed, version, bytes, push, level, parts] = row;
      while (this.spans.length > 0 && this.spans[this.spans.length - 1].id >= id) this.spans.pop();
      const name = phases[phase];
      this.spans.push({ id, phase: name, start, end, sampled, computed, version, bytes, push, level, parts });
    }
  }

  forget(before) {
    const first = this.spans.findIndex((span) => span.end === null || span.end >= before);
    if (first > 0) this.spans.splice(0, first);
  }

  // Calls visit(span, start, end) with each span's part between from and to, the newest first.
  visit(from, to, visit) {
    for (let i = this.spans.length - 1; i >= 0; i -= 1) {
      const span = this.spans[i];
      const end = Math.min(span.end ?? to, to);
      if (end <= from && span.end !== null) break;
      const start = Math.max(span.start, from);
      if (end > start) visit(span, start, end);
    }
  }

  // Time in each phase between from and to.
  times(from, to) {
    const times = new Map();
    const add = (phase, time) => time > 0 && times.set(phase, (times.get(phase) ?? 0) + time);
    this.visit(from, to, (span, start, end) => {
      const whole = (span.end ?? to) - span.start;
      const inside = share(end - start, whole);
      const parts = (span.parts ?? []).map((time) => time * inside);
      parts.forEach((time, i) => add(BRIEF_PARTS[i], time));
      add(span.phase, end - start - parts.reduce((sum, time) => sum + time, 0));
    });
    return times;
  }
}

export class Timeline {
  engine = new Track();
  pushes = new Track();
  phases = [];
  now = 0;
  seconds = 120;
  #lanes = null;

  take(now, spans) {
    this.now = now;
    this.engine.take(spans.engine, this.phases);
    this.pushes.take(spans.push, this.phases);
    this.engine.forget(now - KEEP_SECONDS * SECOND);
    this.pushes.forget(now - KEEP_SECONDS * SECOND);
  }

  clear() {
    this.engine = new Track();
    this.pushes = new Track();
  }

  // Begin of the stretch that is shown: not before the server's start, nor before what is known.
  get from() {
    return Math.max(this.now - this.seconds * SECOND, this.engine.spans[0]?.start ?? 0);
  }

  // Tokens sampled, and computed, per second in the stretch.
  rate(from = this.now - RATE_SECONDS * SECOND) {
    const begin = Math.max(from, this.from);
    let [sampled, computed] = [0, 0];
    this.engine.visit(begin, this.now, (span, start, end) => {
      const inside = share(end - start, (span.end ?? this.now) - span.start);
      sampled += span.sampled * inside;
      computed += span.computed * inside;
    });
    const seconds = (this.now - begin) / SECOND;
    return { sampled: share(sampled, seconds), computed: share(computed, seconds) };
  }

  // Tokens sampled per second in each of n parts of the stretch.
  rates(n) {
    const { from, now } = this;
    const width = (now - from) / n;
    const tokens = new Float64Array(n);
    this.engine.visit(from, now, (span, start, end) => {
      if (span.sampled === 0) return;
      const perTime = share(span.sampled, (span.end ?? now) - span.start);
      for (let i = Math.floor((start - from) / width); i < n && from + i * width < end; i += 1) {
        const overlap = Math.min(end, from + (i + 1) * width) - Math.max(start, from + i * width);
        tokens[i] += perTime * Math.max(0, overlap);
      }
    });
    return Array.from(tokens, (n) => share(n, width / SECOND));
  }

  // Time for which the engine stood without requests while a push arrived.
  waitedForPushes() {
    let time = 0;
    this.pushes.visit(this.from, this.now, (push, start, end) => {
      this.engine.visit(start, end, (span, a, b) => {
        if (span.phase === "idle" || span.phase === "wait_version") time += b - a;
      });
    });
    return time;
  }

  // The ends of the pushes that are shown: the time, and the version that an applied push has made.
  pushEnds() {
    const { spans } = this.pushes;
    const isLast = (span, i) => span.end !== null && span.end >= this.from && spans[i + 1]?.push !== span.push;
    const version = ({ phase, version }) => (phase === "push_commit" && version > 0 ? version : null);
    return spans.filter(isLast).map((span) => ({ at: span.end, version: version(span) }));
  }

  // Why the device is idle, in a sentence.
  sentence() {
    const [whole, times] = [this.now - this.from, this.engine.times(this.from, this.now)];
    if (whole < SECOND) return "Just started";
    const still = [...times].filter(([phase]) => !PHASES[phase]?.works).sort((a, b) => b[1] - a[1]);
    const idle = share(still.reduce((sum, [, time]) => sum + time, 0), whole);
    const isAll = this.seconds * SECOND > whole + SECOND;
    const shown = `the last ${isAll || this.seconds % 60 ? duration(whole / SECOND) : counted(this.seconds / 60, "minute")}`;
    if (idle < 0.01) return `Busy all of ${shown}`;
    const reasons = still.filter(([, time]) => time / whole >= 0.01).slice(0, 3);
    const arriving = share(this.waitedForPushes(), whole);
    const named = reasons.map(([phase, time]) => {
      const push = phase === "idle" && arriving >= 0.01 ? ` (for ${percent(arriving)} a push arrived)` : "";
      return `${PHASES[phase]?.why ?? phase}${reasons.length > 1 ? ` ${percent(time / whole)}` : ""}${push}`;
    });
    return `Idle ${percent(idle)} of ${shown}${named.length > 0 ? `: ${named.join(", ")}` : ""}`;
  }

  // What the engine does now, and since when it does not compute.
  present() {
    const span = this.engine.spans.at(-1);
    if (!span) return "";
    const { label, works } = PHASES[span.phase] ?? { label: span.phase };
    return works ? label : `${label} for ${duration((this.now - span.start) / SECOND)}`;
  }

  tables() {
    const { from, now } = this;
    fill("phases", this.engine.times(from, now), now - from);
    fill("push-phases", this.pushes.times(from, now), now - from);
  }

  // Draws both tracks and the tokens per second over one axis of time.
  draw(canvas) {
    const { context, width, height } = surface(canvas);
    const [text, line] = [color("quiet"), color("line")];
    const { from, now } = this;
    const x = (time) => ((time - from) / (now - from)) * width;
    const lanes = [
      { name: "Engine", track: this.engine, top: 16, height: 44 },
      { name: "Pushes", track: this.pushes, top: 80, height: 16 },
    ];
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const label = (words, top) => {
      context.fillStyle = text;
      context.fillText(words, 0, top - 5);
    };
    for (const { name, track, top, height } of lanes) {
      label(name, top);
      context.fillStyle = line;
      context.fillRect(0, top + height, width, 1);
      const colors = new Map();
      const paint = (phase, ...box) => {
        if (!colors.has(phase)) colors.set(phase, color(phase));
        context.fillStyle = colors.get(phase);
        context.fillRect(...box);
      };
      track.visit(from, now, (span, start, end) => {
        // A little wider than it is: no ground shows between neighbours, and a short push can be seen.
        const least = track === this.pushes ? 2 : 0;
        const box = [x(start), top, Math.max(x(end) - x(start) + 0.5, least), height];
        paint(span.phase, ...box);
        // A brief span has the time of each of its phases, but not their order.
        const whole = (span.end ?? now) - span.start;
        let at = top;
        (span.parts ?? []).forEach((time, i) => {
          const part = share(time, whole) * height;
          paint(BRIEF_PARTS[i], box[0], at, box[2], part);
          at += part;
        });
      });
    }
    const [top, bottom] = [118, height - 18];
    const rates = this.rates(Math.max(1, Math.min(240, Math.floor(width / 4))));
    const most = Math.max(...rates);
    label(`Tokens per second${most > 0 ? `, at most ${count(most)}` : ""}`, top);
    curve(context, rates, { width, top, bottom }, color("decode"));
    context.fillStyle = line;
    context.fillRect(0, bottom, width, 1);
    axis(context, { width, bottom, seconds: (now - from) / SECOND }, text);
    marks(context, this.pushEnds(), x, { top: lanes[1].top, bottom });
    this.#lanes = { lanes, x };
  }

  // The span under a point of the canvas, in words.
  describe(px, py, width) {
    const lane = this.#lanes?.lanes.find(({ top, height }) => py >= top - 14 && py <= top + height);
    if (!lane) return "";
    const { from, now } = this;
    const at = from + (px / width) * (now - from);
    const slack = ((now - from) / width) * 2;
    const found = lane.track.spans.filter((s) => s.start <= at + slack && (s.end ?? now) >= at - slack);
    const span = found.find((s) => s.start <= at && (s.end ?? now) >= at) ?? found.at(-1);
    if (!span) return "";
    const parts = [
      PHASES[span.phase]?.label ?? span.phase,
      `${duration(((span.end ?? now) - span.start) / SECOND)}, ${duration((now - span.start) / SECOND)} ago`,
    ];
    if (span.computed > 0) parts.push(`${counted(span.computed, "token")} computed, ${count(span.sampled)} sampled`);
    if (span.push > 0) parts.push(`push ${span.push}`);
    if (span.level > 0) parts.push(`level ${span.level}`);
    if (span.bytes > 0) parts.push(bytes(span.bytes));
    if (span.version > 0) parts.push(`version ${span.version}`);
    return parts.join(" · ");
  }
}

// Fills a table of phases, in the order in which they are listed above.
function fill(id, times, whole) {
  const table = byId(id);
  table.hidden = times.size === 0;
  const names = Object.keys(PHASES).filter((phase) => times.has(phase));
  const others = [...times.keys()].filter((phase) => !(phase in PHASES));
  table.tBodies[0].replaceChildren(
    ...[...names, ...others].map((phase) => {
      const time = times.get(phase);
      return element(
        "tr",
        "",
        element("td", "", swatch(`var(--${phase})`), PHASES[phase]?.label ?? phase),
        element("td", "num", percent(time / whole)),
        element("td", "num", duration(time / SECOND)),
      );
    }),
  );
}

// The canvas's context in CSS pixels, cleared.
function surface(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// A line with the ground below it filled.
function curve(context, values, { width, top, bottom }, stroke) {
  const most = Math.max(...values, 1);
  const step = width / Math.max(1, values.length - 1);
  context.beginPath();
  values.forEach((value, i) => context.lineTo(i * step, bottom - (value / most) * (bottom - top)));
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, bottom);
  context.lineTo(0, bottom);
  context.fillStyle = stroke;
  context.globalAlpha = 0.16;
  context.fill();
  context.globalAlpha = 1;
}

// A line at the end of each push, with the version that it has made where there is room.
function marks(context, ends, x, { top, bottom }) {
  let free = context.measureText("Pushes").width + 8;
  for (const { at, version } of ends) {
    context.fillStyle = color(version === null ? "bad" : "push_commit");
    context.globalAlpha = 0.55;
    context.fillRect(x(at), top, 1, bottom - top);
    context.globalAlpha = 1;
    const words = version === null ? "failed" : `v${version}`;
    const left = x(at) - context.measureText(words).width;
    if (left < free) continue;
    context.fillText(words, left, top - 5);
    free = x(at) + 8;
  }
}

// Ticks of time, which end with now.
function axis(context, { width, bottom, seconds }, fillStyle) {
  const fits = Math.max(2, Math.floor(width / 80));
  const step = [1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600].find((s) => seconds / s <= fits) ?? 900;
  context.fillStyle = fillStyle;
  context.textAlign = "right";
  context.fillText("now", width, bottom + 14);
  for (let ago = step; ago < seconds; ago += step) {
    const x = width - (ago / seconds) * width;
    context.fillRect(x, bottom, 1, 4);
    context.textAlign = "center";
    const words = ago % 60 === 0 ? `−${ago / 60} min` : `−${ago} s`;
    if (x > 24 && x < width - 40) context.fillText(words, x, bottom + 14);
  }
  context.textAlign = "left";
}
