// Quantiles of the latencies, from histograms that count since the server's start.

import { KEEP_SECONDS, SECOND } from "./timeline.js";

// Two states within this time are one: no more are kept than a page can show.
const LEAST_SECONDS = 1;

export class Latencies {
  states = [];

  // Takes a state of the histograms: by name the buckets that have values, each with its bounds and its count.
  take(now, histograms) {
    const [before, last] = this.states.slice(-2);
    if (last && now - before.now < LEAST_SECONDS * SECOND) this.states.pop();
    this.states.push({ now, histograms });
    const first = this.states.findLastIndex((state) => state.now < now - KEEP_SECONDS * SECOND);
    if (first > 0) this.states.splice(0, first);
  }

  clear() {
    this.states = [];
  }

  // Quantiles of the values since a time, and whether that time is known: if not, they are of all values.
  quantiles(name, from, shares) {
    const base = this.states.findLast((state) => state.now <= from)?.histograms[name];
    const before = new Map(base?.map(([low, , n]) => [low, n]));
    const all = this.states.at(-1)?.histograms[name] ?? [];
    const buckets = all.map(([low, high, n]) => ({ low, high, n: n - (before.get(low) ?? 0) }));
    return { isWhole: base === undefined, values: shares.map((share) => quantile(buckets, share)) };
  }
}

// The value below which this share of the values lies; within a bucket they are taken to be spread evenly.
function quantile(buckets, share) {
  let rest = share * buckets.reduce((sum, { n }) => sum + n, 0);
  for (const { low, high, n } of buckets) {
    if (n > 0 && rest <= n) return high === null ? low : low + (high - low) * (rest / n);
    rest -= n;
  }
  return null;
}
