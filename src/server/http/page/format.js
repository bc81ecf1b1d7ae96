// Numbers as people read them, and elements whose text is never taken for HTML.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${UNITS[unit]}`;
}

export function count(n) {
  return Math.round(n).toLocaleString("en-US");
}

// With its noun in the singular or the plural.
export function counted(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function percent(share) {
  const p = share * 100;
  return `${p > 0 && p < 1 ? "<1" : p > 99 && p < 100 ? ">99" : Math.round(p)} %`;
}

// A time in seconds, with the unit that suits it.
export function duration(s) {
  if (s < 0.001) return `${Math.max(0, s * 1e6).toFixed(0)} µs`;
  if (s < 0.1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} days ${hours % 24} h`;
}

export function ago(s) {
  return s < 1 ? "now" : `${s < 60 ? `${Math.floor(s)} s` : duration(s)} ago`;
}

// The share of part in whole, 0 where there is nothing to share.
export function share(part, whole) {
  return whole > 0 ? part / whole : 0;
}

export const byId = (id) => document.getElementById(id);

// An element with a class and with children, of which strings become text.
export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

export function swatch(color) {
  const made = element("span", "swatch");
  made.style.background = color;
  return made;
}

// Writes only what has changed, so that a selection stays.
export function write(id, text) {
  const at = byId(id);
  if (at.textContent !== text) at.textContent = text;
}
