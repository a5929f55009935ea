"use strict";
// Charts on canvases. Text only ever becomes text: fillText and textContent, never markup.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = () => Array.from({ length: 10 }, (_, i) => css("--c" + i));
// Black or white, whichever is easier to read on a colour such as #2f6db5.
function ink(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}
const tip = document.getElementById("tip");
const ACTIONS = {
  F: ["forward", 0], B: ["backward", 1], I: ["input gradients", 1], W: ["weight gradients", 9],
  SEND_F: ["send", 4], SEND_B: ["send", 4], RECV_F: ["wait for a message", -1],
  RECV_B: ["wait for a message", -1], REDUCE: ["wait for gradients", 3], UPDATE: ["optimizer", 6],
  collectives: ["collectives beside", 2],
};
const MEMORY = ["parameters", "gradients", "optimizer", "saved", "boundary", "temporary",
  "collective", "inputs", "buffers", "outputs"];

function number(value, unit) {
  return Number(value.toPrecision(3)) + " " + unit;
}
function seconds(s) {
  const a = Math.abs(s);
  return a === 0 ? "0 s" : a >= 1 ? number(s, "s") : a >= 1e-3 ? number(s * 1e3, "ms") : number(s * 1e6, "us");
}
function bytes(b) {
  const a = Math.abs(b);
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (a >= scale) return number(b / scale, unit);
  }
  return b + " B";
}
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
}
function hideTip() { tip.style.display = "none"; }

function surface(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  ctx.textBaseline = "middle";
  return { ctx, width, height };
}
function legend(id, entries) {
  const box = document.getElementById(id);
  box.replaceChildren(...entries.map(([name, colour]) => {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = colour;
    item.append(swatch, name);
    return item;
  }));
}
function nice(span, count) {
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
}
// Seconds with as many digits as tell ticks apart.
function tickText(value, step, large = 10 * step) {
  const [unit, scale] = large >= 1 ? ["s", 1] : large >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
  const digits = Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9));
  return (value * scale).toFixed(digits) + " " + unit;
}
function xAxis(ctx, left, right, y, from, to) {
  if (!(to > from)) return;
  const step = nice(to - from, (right - left) / 110);
  ctx.fillStyle = css("--soft");
  ctx.textAlign = "center";
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    const x = left + (i * step - from) / (to - from) * (right - left);
    ctx.fillRect(x, y, 1, 4);
    if (x > left + 8 && x < right - 24) ctx.fillText(tickText(i * step, step), x, y + 12);
  }
}
function yAxis(ctx, left, right, top, bottom, most, format) {
  if (!(most > 0)) return;
  const step = nice(most, (bottom - top) / 45);
  ctx.textAlign = "right";
  for (let i = 0; i * step <= most; i++) {
    const y = bottom - i * step / most * (bottom - top);
    ctx.fillStyle = css("--line");
    ctx.fillRect(left, y, right - left, 1);
    ctx.fillStyle = css("--soft");
    ctx.fillText(format(i * step), left - 6, y);
  }
}
function capacityLine(ctx, left, right, y, label) {
  ctx.strokeStyle = ctx.fillStyle = css("--bad");
  ctx.setLineDash([6, 4]);
  ctx.beginPath();
  ctx.moveTo(left, y);
  ctx.lineTo(right, y);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.textAlign = "right";
  const wide = ctx.measureText(label).width;
  ctx.fillStyle = css("--back");
  ctx.fillRect(right - wide - 8, y - 16, wide + 8, 14);
  ctx.fillStyle = css("--bad");
  ctx.fillText(label, right - 4, y - 9);
}

// Starts count from the start before them in the file.
function unpackRow(row) {
  const count = row.k.length, start = new Float64Array(count), end = new Float64Array(count);
  let at = 0;
  for (let i = 0; i < count; i++) {
    if (i === row.n[0]) at = 0;
    at += row.t[i];
    start[i] = at;
    end[i] = at + row.d[i];
  }
  return { ...row, start, end, main: row.n[0] };
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.canvas = document.getElementById("timeline-canvas");
    this.rows = data.rows.map(unpackRow);
    this.measured = data.measured ? data.measured.rows.map(unpackRow) : null;
    let end = 1;
    for (const row of [...this.rows, ...(this.measured || [])]) {
      for (let i = 0; i < row.end.length; i++) if (row.end[i] > end) end = row.end[i];
    }
    this.whole = end;
    this.from = 0;
    this.to = end;
    this.left = 46;
    this.pointers = new Map();
    this.listen();
  }
  get right() { return this.canvas.clientWidth - 8; }
  rowHeight() {
    const usual = this.measured ? 40 : 24, count = this.rows.length;
    return Math.max(this.measured ? 16 : 9, Math.min(usual, Math.floor(620 / count)));
  }
  draw() {
    const each = this.rowHeight();
    const { ctx, width, height } = surface(this.canvas, each * this.rows.length + 34);
    const colours = this.data.kinds.map((kind) => ACTIONS[kind][1]).map(
      (i) => (i < 0 ? css("--wait") : palette()[i]));
    ctx.fillStyle = css("--back");
    ctx.fillRect(0, 0, width, height);
    const labels = Math.ceil(13 / each);
    this.rows.forEach((row, i) => {
      const y = 6 + i * each, high = each - (each > 14 ? 3 : 1);
      const half = this.measured ? high / 2 : high;
      this.drawRow(ctx, row, y, half, colours);
      if (this.measured) this.drawRow(ctx, this.measured[i], y + half, half - 1, colours);
      if (i % labels === 0) {
        ctx.fillStyle = css("--soft");
        ctx.textAlign = "right";
        ctx.fillText(String(i), this.left - 8, y + high / 2);
      }
    });
    const tick = this.data.tick_s;
    xAxis(ctx, this.left, this.right, height - 24, this.from * tick, this.to * tick);
    document.getElementById("timeline-status").textContent =
      `shown: ${this.at(this.from)} to ${this.at(this.to)} of ` +
      `${seconds(this.whole * tick)}`;
  }
  first(row) {  // the first item of the main list that ends after the left border
    let low = 0, high = row.main;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] < this.from) low = middle + 1; else high = middle;
    }
    return low;
  }
  drawRow(ctx, row, y, high, colours) {
    const scale = (this.right - this.left) / (this.to - this.from);
    const thin = Math.max(2, Math.round(high * 0.3));
    const paint = (i, top, tall) => {
      const a = Math.max(this.left, this.left + (row.start[i] - this.from) * scale);
      const b = Math.min(this.right, this.left + (row.end[i] - this.from) * scale);
      if (b <= a) return a;
      ctx.fillStyle = colours[row.k[i]];
      ctx.fillRect(a, top, Math.max(0.6, b - a > 3 ? b - a - 0.6 : b - a), tall);
      if (b - a > 26 && tall > 10 && row.k[i] < 4) {
        ctx.fillStyle = ink(colours[row.k[i]]);
        ctx.textAlign = "center";
        ctx.fillText(`${row.m[i]}`, (a + b) / 2, top + tall / 2);
      }
      return b;
    };
    let done = -1;
    for (let i = this.first(row); i < row.main && row.start[i] <= this.to; i++) {
      const b = this.left + (row.end[i] - this.from) * scale;
      if (b - done < 0.5) continue;  // nothing that one could see
      done = paint(i, y, high);
    }
    for (let i = row.main; i < row.k.length; i++) {
      if (row.end[i] >= this.from && row.start[i] <= this.to) paint(i, y + high - thin, thin);
    }
  }
  legend() {
    const used = new Set();
    for (const row of [...this.rows, ...(this.measured || [])]) {
      row.k.forEach((k, i) => { if (row.end[i] > row.start[i]) used.add(k); });
    }
    const names = new Map();
    this.data.kinds.forEach((kind, i) => {
      const [name, colour] = ACTIONS[kind];
      if (used.has(i)) {
        names.set(name, colour < 0 ? css("--wait") : palette()[colour]);
      }
    });
    legend("timeline-legend", [...names]);
  }
  zoom(factor, at) {
    if (!factor) {
      [this.from, this.to] = [0, this.whole];
    } else {
      const centre = at === undefined ? (this.from + this.to) / 2 : at;
      const span = Math.min(this.whole, Math.max(40, (this.to - this.from) / factor));
      const share = (centre - this.from) / (this.to - this.from);
      this.from = centre - share * span;
      this.to = this.from + span;
    }
    this.pan(0);
  }
  pan(ticks) {
    const span = this.to - this.from;
    this.from = Math.max(0, Math.min(this.whole - span, this.from + ticks));
    this.to = this.from + span;
    if (!this.waiting) {
      this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
    }
  }
  tickAt(x) {
    return this.from + (x - this.left) / (this.right - this.left) * (this.to - this.from);
  }
  at(ticks) {  // with as many digits as what is shown needs
    const tick = this.data.tick_s;
    return tickText(ticks * tick, (this.to - this.from) * tick / 1000, this.to * tick);
  }
  describe(x, y) {
    const each = this.rowHeight(), place = Math.floor((y - 6) / each), at = this.tickAt(x);
    if (x < this.left || place < 0 || place >= this.rows.length) return "";
    const lower = this.measured && (y - 6) % each > each / 2;
    const row = lower ? this.measured[place] : this.rows[place];
    const word = lower ? `measured, rank ${this.data.measured.ranks[place]}` : "predicted";
    const head = `pipeline rank ${place} (${word})`;
    const slack = (this.to - this.from) / (this.right - this.left);
    let best = -1;
    for (let i = this.first(row); i < row.main && row.start[i] <= at + slack; i++) {
      if (row.end[i] >= at - slack && row.end[i] > row.start[i]) best = i;
    }
    if (best < 0) return `${head}\nidle`;
    const kind = this.data.kinds[row.k[best]], tick = this.data.tick_s;
    const peer = row.p[best] >= 0 ? `, from stage ${row.p[best]}` : "";
    return `${head}\n${row.s[best]}${kind}${row.m[best]}: ${ACTIONS[kind][0]}, stage ` +
      `${row.s[best]}, microbatch ${row.m[best]}${peer}\n${this.at(row.start[best])} to ` +
      `${this.at(row.end[best])}: ${seconds((row.end[best] - row.start[best]) * tick)}`;
  }
  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY / 240), this.tickAt(event.offsetX));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan(event.deltaX * (this.to - this.from) / (this.right - this.left));
      }
    }, { passive: false });
    canvas.addEventListener("dblclick", (e) => this.zoom(3, this.tickAt(e.offsetX)));
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("keydown", (event) => {
      const span = this.to - this.from;
      const act = {
        ArrowLeft: () => this.pan(-span / 8), ArrowRight: () => this.pan(span / 8),
        "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(0.625),
        0: () => this.zoom(0), Home: () => this.pan(-this.whole), End: () => this.pan(this.whole),
      }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
    });
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => this.zoom(Number(button.dataset.zoom)));
    }
  }
  moved(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) {
      showTip(event, this.describe(event.offsetX, event.offsetY));
      return;
    }
    hideTip();
    if (this.pointers.size === 2) {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const now = Math.abs(event.offsetX - other), then = Math.abs(before - other);
      if (now > 8 && then > 8) this.zoom(now / then, this.tickAt((event.offsetX + other) / 2));
    } else {
      this.pan((before - event.offsetX) * (this.to - this.from) / (this.right - this.left));
    }
    this.pointers.set(event.pointerId, event.offsetX);
  }
}
