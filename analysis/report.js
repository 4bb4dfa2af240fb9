"use strict";
(() => {
  // Everything from the trace reaches the page as text, through textContent; nothing is parsed as HTML.
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const TYPES = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, u2: Uint16Array, u1: Uint8Array, i1: Int8Array };
  const unpack = (packed) => {
    if (!packed) return null;
    const bytes = Uint8Array.from(atob(packed.bdata), (c) => c.charCodeAt(0));
    return new TYPES[packed.dtype](bytes.buffer);
  };
  const unpackAll = (group) => Object.fromEntries(Object.entries(group).map(([k, v]) => [k, v && v.bdata !== undefined ? unpack(v) : v]));

  const steps = unpackAll(data.steps);
  const tokens = unpackAll(data.tokens);
  const spans = unpackAll(data.spans);
  const work = unpackAll(data.work);
  const shapes = { texts: data.shapes.texts, input: unpack(data.shapes.input), output: unpack(data.shapes.output) };
  const blocks = data.blocks.map(([key, label, color]) => ({ key, label, color }));
  const time = unpack(data.time);
  const bounds = data.bounds && unpackAll(data.bounds);
  const judged = data.verdict && unpackAll(data.verdict);
  const layouts = data.spans.layouts.map(unpackLayout);
  const OUTSIDE = new Set(["prepare", "embed", "forward", "final_norm", "lm_head", "sample", "nested", "other", "between"]);
  const state = { call: 0, sequence: 0, row: 0, zoom: null, focus: -1, shown: 0, timer: null, tint: "wait", point: -1 };

  function unpackLayout(packed) {
    const flat = unpack(packed), n = flat.length / 6;
    const column = (i) => flat.subarray(i * n, (i + 1) * n);
    const layout = { n, parent: column(0), block: column(1), name: column(2), layer: column(3), input: column(4), output: column(5) };
    layout.depth = new Uint8Array(n);
    for (let i = 0; i < n; i++) layout.depth[i] = layout.parent[i] < 0 ? 0 : layout.depth[layout.parent[i]] + 1;
    return layout;
  }

  // -- numbers for people ---------------------------------------------------------------

  const NONE = "–";
  const missing = (v) => v === null || v === undefined || Number.isNaN(v);
  const digits = (v) => v.toLocaleString("en-US", v && Math.abs(v) < 1000 ? { maximumSignificantDigits: 3, minimumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
  const scaled = (v, units) => {
    for (const [scale, unit] of units) if (Math.abs(v) >= scale) return `${digits(v / scale)} ${unit}`;
    return null;
  };
  const asTime = (ns) => missing(ns) ? NONE : scaled(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) || `${Math.round(ns)} ns`;
  const asBytes = (n) => missing(n) ? NONE : scaled(n, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) || (n ? `${n} B` : "0");
  const asWork = (n) => missing(n) ? NONE : scaled(n, [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1e3, "kFLOP"]]) || (n ? `${n} FLOP` : "0");
  const asShare = (f) => missing(f) ? NONE : `${(f * 100).toFixed(1)}%`;
  const asCount = (n, noun) => `${missing(n) ? NONE : n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;

  // -- building blocks ------------------------------------------------------------------

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colorOf = (block) => themed(`--b-${block.key}`) || block.color;
  const cell = (row, block) => row * blocks.length + block;
  const blockIndex = (key) => blocks.findIndex((block) => block.key === key);
  const workOf = (name, row, block) => block >= 0 && work[name] ? work[name][cell(row, block)] : null;
  const shapeOf = (code) => code >= 0 ? shapes.texts[code] : null;
  const timeOf = (row, block) => block >= 0 && time[cell(row, block)] > 0 ? time[cell(row, block)] : null;
  const percent = (f) => f >= 0.01 ? `${Math.round(f * 100)}%` : "<1%";
  /** What limits a block in a step: words such as "memory 87%", the bare word, the roof; null without ceilings. */
  function boundOf(row, block) {
    if (!bounds || block < 0) return null;
    const at = cell(row, block), word = bounds.words[bounds.bound[at]], near = bounds.close_to[at];
    if (word === "unknown") return { text: NONE, word, roof: null };
    const share = missing(bounds.efficiency[at]) ? "" : `\u00a0${percent(bounds.efficiency[at])}`;
    return { text: word + (near ? ` ≈ ${bounds.words[near]}` : "") + share, word, roof: bounds.roof_ns[at] };
  }
  for (const one of data.calls) one.rows = unpack(one.rows);
  const call = () => data.calls[state.call];
  const place = (row) => call().rows.indexOf(row);
  // a page that leaves steps out says what came before each that it holds
  const rowBefore = (row) => place(row) > 0 ? call().rows[place(row) - 1] : -1;
  const lastRow = () => call().rows[call().rows.length - 1];
  const parted = blocks.some((block) => !OUTSIDE.has(block.key) && block.key !== "layer");
  const layerTime = (row) => {
    const inside = blocks.map((block, i) => OUTSIDE.has(block.key) ? 0 : time[cell(row, i)]);
    return inside.reduce((a, b) => a + b, 0) || null;
  };

  function stepName(row) {
    if (steps.prefill[row]) return "Prefill";
    if (steps.number) return `Decode ${steps.number[row].toLocaleString("en-US")}`;
    const decodes = call().rows.reduce((n, i) => n + (i <= row && !steps.prefill[i]), 0);
    return `Decode ${decodes.toLocaleString("en-US")}`;
  }

  // -- tokens ---------------------------------------------------------------------------

  function tokenRange() {
    const wanted = call().call;
    let from = -1, to = -1;
    for (let i = 0; i < tokens.call.length; i++) {
      if (tokens.call[i] !== wanted || tokens.sequence[i] !== state.sequence) continue;
      if (from < 0) from = i;
      to = i + 1;
    }
    return from < 0 ? [0, 0] : [from, to];
  }

  function tokenText(i) {
    const text = tokens.text[i] >= 0 ? tokens.texts[tokens.text[i]] : null;
    return text === null || text === "" ? `#${tokens.id[i]}` : text;
  }

  function tokenNode(i, className, tag = "bdi") {
    const text = tokenText(i);
    const node = make(tag, className, text.replaceAll("\uFFFD", "◌"));
    node.dir = "auto";
    if (text.includes("\uFFFD")) {
      node.classList.add("broken");
      node.title = "Part of a character that is split over tokens";
    }
    if (tokens.special[i]) node.classList.add("special");
    return node;
  }

  function tokenFacts(i) {
    const facts = [`“${tokenText(i).trim()}”`, `id ${tokens.id[i]}`, `position ${tokens.position[i]}`];
    const before = i > 0 && tokens.generated[i - 1] ? "the one before" : "the request began";
    if (tokens.generated[i]) facts.push(`${asTime(tokens.waited_ns[i])} after ${before}`);
    if (tokens.logprob && !missing(tokens.logprob[i])) {
      facts.push(`logprob ${tokens.logprob[i].toFixed(2)} (probability ${asShare(Math.exp(tokens.logprob[i]))})`);
    }
    if (tokens.entropy && !missing(tokens.entropy[i])) facts.push(`entropy ${tokens.entropy[i].toFixed(2)} nats`);
    return facts.join(", ");
  }

  /** What goes into a step (its prompt positions, or what the step before chose) and what comes out. */
  function tokensOfStep(row) {
    const [from, to] = tokenRange(), step = steps.step[row];
    const before = steps.before ? steps.before[row] : rowBefore(row) >= 0 ? steps.step[rowBefore(row)] : null;
    const found = { past: [], into: [], out: [] };
    for (let i = from; i < to; i++) {
      const of = tokens.step[i];
      if (tokens.generated[i]) {
        if (of === step) found.out.push(i);
        else if (of === before && !steps.prefill[row]) found.into.push(i);
        else if (of < step && of >= 0) found.past.push(i);
      } else if (of === step) found.into.push(i);
      else if (of < step) found.past.push(i);
    }
    return found;
  }

  // -- the lifecycle map ----------------------------------------------------------------

  function meters(target, rows) {
    target.replaceChildren(...rows.filter(Boolean).map(([label, value, className]) => {
      const row = make("div", className);
      const shown = make("dd", "", value);
      if (label === "in" || label === "out") shown.classList.add("shape");
      row.append(make("dt", "", label), shown);
      return row;
    }));
  }

  function blockMeters(row, block) {
    const at = block < 0 ? -1 : cell(row, block);
    const known = (name) => !missing(workOf(name, row, block)) && workOf(name, row, block) > 0;
    return [
      ["in", compact(at >= 0 && shapeOf(shapes.input[at]))],
      ["out", compact(at >= 0 && shapeOf(shapes.output[at]))],
      known("weight_bytes") ? ["weights", asBytes(workOf("weight_bytes", row, block))] : null,
      known("kv_read_bytes") ? ["KV read", asBytes(workOf("kv_read_bytes", row, block))] : null,
      known("kv_write_bytes") ? ["KV new", asBytes(workOf("kv_write_bytes", row, block))] : null,
      known("flops") ? ["work", asWork(workOf("flops", row, block))] : null,
      boundRow(row, block),
    ];
  }

  function boundRow(row, block) {
    const found = boundOf(row, block);
    return found && ["bound", found.text, `bound ${found.word}`];
  }

  const compact = (shape) => (shape || NONE).replaceAll(" ", "");
  const took = (row, ns) => [asTime(ns), asShare(ns === null ? null : ns / steps.wall_ns[row]), "took"];

  const FEW = 8, ODD = 1.5;
  const usual = new Map();

  /** The median time of a block in the steps of a phase, NaN of few. */
  function usualTime(block, prefill) {
    const key = `${block} ${prefill}`;
    if (!usual.has(key)) {
      const times = [];
      for (let row = 0; row < steps.step.length; row++) {
        if (steps.prefill[row] === prefill && steps.counted[row] && timeOf(row, block) !== null) times.push(timeOf(row, block));
      }
      times.sort((a, b) => a - b);
      usual.set(key, times.length < FEW ? NaN : times[times.length >> 1]);
    }
    return usual.get(key);
  }

  /** A warning where a block took much longer than in other steps of the phase. */
  function oddRow(row, block) {
    const ratio = timeOf(row, block) / usualTime(block, steps.prefill[row]);
    return ratio >= ODD ? ["slow", `${ratio.toFixed(1)} × the usual`, "odd"] : null;
  }

  function drawMap(row) {
    for (const card of document.querySelectorAll("#map [data-stage]")) {
      const stage = card.dataset.stage, block = blockIndex(stage === "ids" ? "prepare" : stage);
      const ns = stage === "layer" ? layerTime(row) : timeOf(row, block);
      card.style.setProperty("--mine", `var(--b-${stage === "ids" ? "prepare" : stage === "layer" ? "line" : stage}, var(--line))`);
      const target = card.querySelector(":scope > .meters");
      if (stage === "ids") {
        meters(target, [["out", `${steps.batch[row]}×${steps.q_len[row]}`], oddRow(row, block), took(row, ns)]);
      } else if (stage === "layer") {
        // what the parts show already is not summed up again
        const all = blockMeters(row, block);
        meters(target, [...(parted ? [...all.slice(0, 2), boundRow(row, block)] : all), took(row, ns)]);
      } else if (stage === "sample") {
        meters(target, [boundRow(row, block), oddRow(row, block), took(row, ns)]);
      } else meters(target, [...blockMeters(row, block), oddRow(row, block), took(row, ns)]);
    }
    for (const figure of document.querySelectorAll("#map .data")) drawData(figure, row);
    drawKv(row);
    drawTokensOfStep(row);
    drawWhole(row);
  }

  const MOST_ROWS = 14;

  /** What a stage gives on, as a stripe a position: many in a prefill, one in a decode step. */
  function drawData(figure, row) {
    const block = blockIndex(figure.closest("[data-stage]").dataset.stage);
    const sides = block < 0 ? null : (shapeOf(shapes.output[cell(row, block)]) || "").split(" × ").map(Number);
    figure.hidden = !sides || sides.length !== 3;
    if (figure.hidden) return;
    const count = sides[0] * sides[1], [stripes, words] = figure.children;
    stripes.style.setProperty("--n", Math.min(count, MOST_ROWS));
    stripes.style.setProperty("--fade", count > MOST_ROWS ? "linear-gradient(#000 60%, transparent)" : "none");
    words.textContent = `${asCount(count, figure.dataset.unit)} of ${sides[2].toLocaleString("en-US")} ${figure.dataset.of}`;
  }

  function drawKv(row) {
    const end = lastRow(), most = Math.max(steps.kv_len_after[end] || 0, steps.kv_len_after[row] || 0, 1);
    const before = steps.kv_len_before[row], after = steps.kv_len_after[row];
    const percent = (n) => `${(missing(n) ? 0 : n) / most * 100}%`;
    const [old, fresh] = $("kvbox").children;
    old.style.width = percent(before);
    fresh.style.left = percent(before);
    fresh.style.width = percent(after - before);
    const line = (angle, n) => `repeating-linear-gradient(${angle}, transparent 0 calc(100% / ${n} - 1px), var(--paper) calc(100% / ${n} - 1px) calc(100% / ${n}))`;
    const grids = [most <= 128 ? line("90deg", most) : null, data.layers > 1 && data.layers <= 24 ? line("180deg", data.layers) : null];
    $("kvbox").style.setProperty("--grid", grids.filter(Boolean).join(",") || "none");
    const held = steps.kv_bytes[row], earlier = steps.kv_before ? steps.kv_before[row] : rowBefore(row) >= 0 ? steps.kv_bytes[rowBefore(row)] : 0;
    const added = held - earlier;
    $("kvtext").textContent = missing(after) && missing(held)
      ? "No KV cache was seen."
      : `KV cache after this step: ${asCount(after, "position")} in ${asCount(data.layers, "layer")}, ${asBytes(held)}` +
        (added > 0 ? ` (+${asBytes(added)}).` : ".");
  }

  function drawTokensOfStep(row) {
    const { past, into, out } = tokensOfStep(row);
    const prefill = steps.prefill[row], q = steps.q_len[row];
    const shown = (list, most) => list.slice(Math.max(0, list.length - most));
    const line = [...shown(past, 60).map((i) => tokenNode(i, "past")), ...shown(into, 60).map((i) => tokenNode(i, "in")), ...out.map((i) => tokenNode(i, "out"))];
    const hidden = past.length + into.length + out.length - line.length;
    if (hidden > 0) line.unshift(make("span", "past", `… ${asCount(hidden, "token")} … `));
    for (const node of line) node.textContent = node.textContent.replaceAll("⏎\n", "⏎");
    $("context").replaceChildren(...line);
    $("context").scrollTop = $("context").scrollHeight;
    const chips = into.slice(0, 5).map(chip);
    if (q > chips.length && chips.length) chips.push(make("span", "muted", `and ${(q - chips.length).toLocaleString("en-US")} more`));
    $("ids").replaceChildren(...chips);
    $("chosen").replaceChildren(...out.slice(0, 5).map((i) => {
      const node = chip(i);
      node.classList.add("out");
      if (tokens.logprob && !missing(tokens.logprob[i])) node.lastChild.textContent += `, ${asShare(Math.exp(tokens.logprob[i]))}`;
      return node;
    }));
    $("saying").textContent = prefill
      ? `Prefill: ${q === 1 ? "the one prompt token goes" : `all ${q.toLocaleString("en-US")} positions go`} through every stage at once, and leave${q === 1 ? "s its" : " their"} keys and values in the cache. The last position chooses the first new token.`
      : `${stepName(row)}: only ${q === 1 ? "the token chosen last goes" : `the last ${q} positions go`} in. Attention reads the ${asCount(steps.kv_len_before[row], "earlier position")} from the KV cache instead of computing them again.`;
    const last = row === lastRow(), reason = call().stop[state.sequence] || call().stop[0];
    $("loop").classList.toggle("done", last);
    $("loop").firstElementChild.textContent = last ? (reason ? `stops here: ${reason}` : "last step that was recorded") : "append, and go round again";
  }

  function chip(i) {
    const node = make("span", "chip");
    const text = tokenNode(i);
    const shown = text.textContent.replaceAll("⏎\n", "⏎");
    text.textContent = shown.trim() || shown;
    node.append(text, make("small", "", `${tokens.id[i]}`));
    return node;
  }

  /** A named colour, as legends show it. */
  function legendItem(block, more) {
    const item = make("li"), dot = make("b", "dot");
    dot.style.background = colorOf(block);
    item.append(dot, make("bdi", "", block.label), more || "");
    return item;
  }

  function drawWhole(row) {
    const wall = steps.wall_ns[row];
    const named = blocks.map((block, i) => ({ block, ns: time[cell(row, i)] })).filter(({ block, ns }) => ns > 0 && block.key !== "between");
    $("whole").replaceChildren(...named.map(({ block, ns }) => {
      const part = make("i");
      part.style.cssText = `width:${ns / wall * 100}%;background:${colorOf(block)}`;
      part.title = `${block.label}: ${asTime(ns)}, ${asShare(ns / wall)}`;
      return part;
    }));
    $("whole").setAttribute("aria-label", `This step's ${asTime(wall)}: ` + named.map(({ block, ns }) => `${block.label} ${asShare(ns / wall)}`).join(", "));
    $("legend").replaceChildren(...named.map(({ block, ns }) => legendItem(block, ` ${asShare(ns / wall)}`)));
    $("timeline-legend").replaceChildren(...blocks.map((block) => legendItem(block)));
  }

  // -- the chosen step's spans ----------------------------------------------------------

  const ROW = 27, AXIS = 22;
  const bare = (block) => block === "layer";

  /** The spans of a step as rectangles on its own time axis, or null where the page has none. */
  function spansOf(row) {
    const layout = layouts[spans.layout[row]];
    if (!layout) return null;
    const first = spans.first[row], wall = steps.wall_ns[row];
    return {
      ...layout,
      start: (i) => spans.at[first + i] / 65535 * wall,
      ns: (i) => spans.ns[first + i],
      title: (i) => layout.layer[i] >= 0 && layout.parent[i] < 0 ? `layer ${layout.layer[i]}` : spans.words[layout.name[i]] || "?",
    };
  }

  function blockOfSpan(step, i) {
    let at = i;
    while (at >= 0 && step.block[at] < 0) at = step.parent[at];
    return at >= 0 ? blocks[step.block[at]] : null;
  }

  function drawDetail() {
    const row = state.row, canvas = $("detail"), step = spansOf(row);
    $("detail-title").textContent = `${stepName(row)} · step ${steps.step[row]} · ${asTime(steps.wall_ns[row])}${stepVerdict(row)}`;
    $("detail-box").hidden = !step;
    $("detail-note").textContent = step
      ? "Each bar is a stage, on the step's own time; inside it are its parts. What is blank belongs to no recorded call. Choose a bar to zoom in."
      : spans.layout[row] === -2
        ? "The spans of this step are in the trace, not in this page, to keep it small. Steps with all their spans are spread over the run."
        : "No spans were recorded for this step.";
    drawBlockTable(row);
    if (!step) { $("readout").textContent = ""; return; }
    const width = $("detail-box").clientWidth, ratio = window.devicePixelRatio || 1;
    const depth = step.depth.reduce((a, b) => Math.max(a, b), 0) + 1, height = depth * ROW + AXIS;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = themed("--panel");
    pen.fillRect(0, 0, width, depth * ROW);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const [from, to] = state.zoom || [0, steps.wall_ns[row]], scale = width / (to - from);
    for (let i = 0; i < step.n; i++) drawSpan(pen, step, i, (step.start(i) - from) * scale, step.ns(i) * scale, width);
    drawAxis(pen, from, to, width, depth * ROW);
    $("readout").textContent = state.focus >= 0 ? spanFacts(step, state.focus) : "";
  }

  function stepVerdict(row) {
    if (!steps.counted[row]) return " · cold, or its result was not used: statistics leave it out";
    const word = judged && bounds.words[judged.bound[row]];
    if (!word || word === "unknown") return "";
    return ` · ${word}-bound` + (missing(judged.efficiency[row]) ? "" : `, ${percent(judged.efficiency[row])} of its roof`);
  }

  function drawSpan(pen, step, i, x, w, width) {
    if (x > width || x + w < 0) return;
    const y = step.depth[i] * ROW, block = blockOfSpan(step, i);
    const left = Math.max(x, 0), wide = Math.max(Math.min(x + w, width) - left, 0.6);
    const plain = !block || (bare(block.key) && step.parent[i] < 0);
    pen.globalAlpha = step.block[i] < 0 ? 0.55 : 1;
    pen.fillStyle = plain ? themed("--line") : colorOf(block);
    pen.fillRect(left + (wide > 3 ? 0.5 : 0), y + 1, Math.max(wide - (wide > 3 ? 1 : 0), 0.6), ROW - 2);
    pen.globalAlpha = 1;
    if (i === state.focus) {
      pen.strokeStyle = themed("--next");
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, y + 2, Math.max(wide - 2, 1), ROW - 4);
    }
    const label = spanLabel(step, i, wide, pen);
    if (!label) return;
    const dark = !plain && step.block[i] >= 0 && ["attention", "nested", "layer"].includes(block.key);
    pen.fillStyle = plain || step.block[i] < 0 ? themed("--ink") : dark ? "#ffffff" : "#1d2228";
    pen.fillText(label, left + 4, y + ROW / 2 + 0.5);
  }

  /** The longest form of a span's name that fits: whole, last component, or a layer's bare number. */
  function spanLabel(step, i, wide, pen) {
    if (wide < 14) return null;
    const title = step.title(i);
    const forms = [title, title.split(".").pop(), title.replace(/^layer /, "")];
    return forms.find((form) => form.length < 60 && pen.measureText(form).width < wide - 6) || null;
  }

  function drawAxis(pen, from, to, width, y) {
    const rough = (to - from) / Math.max(width / 110, 2), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.fillStyle = themed("--soft");
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const x = (t - from) / (to - from) * width;
      pen.fillRect(x, y, 1, 4);
      const label = t === 0 ? "0" : asTime(t).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
      const room = pen.measureText(label).width;
      pen.fillText(label, Math.min(Math.max(x - room / 2, 0), width - room), y + 13);
    }
  }

  function spanFacts(step, i) {
    const share = step.ns(i) / steps.wall_ns[state.row];
    const facts = [spans.words[step.name[i]] || step.title(i)];
    if (step.layer[i] >= 0) facts.push(`layer ${step.layer[i]}`);
    facts.push(`${asTime(step.ns(i))}, ${asShare(share)} of the step`, `begins at ${asTime(step.start(i))}`);
    const [input, output] = [shapeOf(step.input[i]), shapeOf(step.output[i])];
    if (input || output) facts.push(`${input || NONE} → ${output || NONE}`);
    return facts.join(" · ");
  }

  function drawBlockTable(row) {
    const wall = steps.wall_ns[row];
    const known = (name) => work[name] && blocks.some((_, i) => !missing(workOf(name, row, i)));
    const columns = [["weights read", "weight_bytes", asBytes], ["KV read", "kv_read_bytes", asBytes], ["KV written", "kv_write_bytes", asBytes], ["FLOPs", "flops", asWork]].filter(([, name]) => known(name));
    const shaped = blocks.some((_, i) => shapes.output[cell(row, i)] >= 0);
    const head = make("tr");
    head.append(make("th", "", "Stage"), make("th", "num", "time"), make("th", "num", "share"));
    for (const [label] of columns) head.append(make("th", "num", label));
    if (bounds) head.append(make("th", "num", "roof"), make("th", "", "bound"));
    if (shaped) head.append(make("th", "", "shape"));
    const body = blocks.map((block, i) => ({ block, i })).filter(({ block, i }) => time[cell(row, i)] > 0 && block.key !== "between").map(({ block, i }) => {
      const line = make("tr"), name = make("th"), dot = make("b", "dot");
      name.scope = "row";
      dot.style.background = colorOf(block);
      name.append(dot, make("bdi", "", block.label));
      line.append(name, make("td", "num", asTime(time[cell(row, i)])), make("td", "num", asShare(time[cell(row, i)] / wall)));
      // a layer's own row counts all its parts: beside them it would count them twice
      const own = !(block.key === "layer" && parted);
      for (const [, column, show] of columns) line.append(make("td", "num", own ? show(workOf(column, row, i)) : NONE));
      const found = own ? boundOf(row, i) : null;
      if (bounds) line.append(make("td", "num", asTime(found && found.roof)), make("td", "", found ? found.text : NONE));
      const [input, output] = own ? [shapeOf(shapes.input[cell(row, i)]), shapeOf(shapes.output[cell(row, i)])] : [];
      if (shaped) line.append(make("td", "mono", input || output ? `${input || NONE} → ${output || NONE}` : NONE));
      return line;
    });
    const top = make("thead"), rest = make("tbody");
    top.append(head);
    rest.append(...body);
    $("detail-table").replaceChildren(top, rest);
  }

  function spanAt(event) {
    const step = spansOf(state.row), box = $("detail").getBoundingClientRect();
    const [from, to] = state.zoom || [0, steps.wall_ns[state.row]];
    const at = from + (event.clientX - box.left) / box.width * (to - from), depth = Math.floor((event.clientY - box.top) / ROW);
    const slack = (to - from) / box.width;
    for (let i = 0; step && i < step.n; i++) {
      if (step.depth[i] === depth && at >= step.start(i) - slack && at <= step.start(i) + step.ns(i) + slack) return i;
    }
    return -1;
  }

  function zoomTo(i) {
    const step = spansOf(state.row);
    const whole = i < 0 || (state.zoom && state.zoom.span === i);
    state.zoom = whole ? null : Object.assign([step.start(i), step.start(i) + Math.max(step.ns(i), 1)], { span: i });
    state.focus = i;
    drawDetail();
  }

  function moveFocus(key) {
    const step = spansOf(state.row);
    if (!step) return false;
    const at = Math.max(state.focus, 0), same = (i) => step.depth[i] === step.depth[at];
    let next = at;
    if (key === "ArrowRight") for (next = at + 1; next < step.n && !same(next);) next++;
    else if (key === "ArrowLeft") for (next = at - 1; next >= 0 && !same(next);) next--;
    else if (key === "ArrowUp") next = step.parent[at];
    else if (key === "ArrowDown") next = at + 1 < step.n && step.parent[at + 1] === at ? at + 1 : at;
    else if (key === "Enter") return zoomTo(at), true;
    else if (key === "Escape") return zoomTo(-1), true;
    else return false;
    state.focus = next >= 0 && next < step.n ? next : at;
    drawDetail();
    return true;
  }

  // -- the token strip ------------------------------------------------------------------

  const CHUNK = 400, FIRST = 2000;

  function drawStrip() {
    if (!$("strip")) return;
    $("strip").replaceChildren();
    state.shown = 0;
    const [from, to] = tokenRange();
    const values = [];
    for (let i = from; i < to; i++) if (tokens.generated[i] && !missing(tintOf(i))) values.push(tintOf(i));
    // the first token waits for the whole prefill: left out of the scale, it takes the darkest colour
    const rest = values.slice(state.tint === "wait" ? 1 : 0).sort((a, b) => a - b), at = (f) => rest[Math.floor(f * (rest.length - 1))];
    const show = state.tint === "wait" ? asTime : asShare;
    state.heat = !rest.length ? null : state.tint === "wait" ? [at(0.02), Math.max(at(0.98), at(0.02) * 1.2)] : [0, 1];
    $("tint-words").textContent = state.tint === "wait"
      ? "The stronger its colour, the longer a token took after the one before."
      : "The stronger its colour, the less probable the model held the token.";
    $("scale").replaceChildren(...(!state.heat ? [] : state.tint === "wait"
      ? [show(state.heat[0]), make("i"), show(state.heat[1])] : ["probability 100%", make("i"), "0%"]));
    moreTokens();
  }

  /** What a token's colour shows: its wait in ns, or 1 − its probability. */
  const tintOf = (i) => state.tint === "wait" ? tokens.waited_ns[i] : 1 - Math.exp(tokens.logprob[i]);

  function moreTokens() {
    const [from, to] = tokenRange(), end = Math.min(to, from + state.shown + FIRST);
    for (let i = from + state.shown; i < end; i += CHUNK) {
      const chunk = make("span", "chunk");
      for (let k = i; k < Math.min(i + CHUNK, end); k++) chunk.append(stripToken(k));
      $("strip").append(chunk);
    }
    state.shown = end - from;
    const left = to - end;
    $("more").hidden = left <= 0;
    $("more").textContent = `Show ${Math.min(left, FIRST).toLocaleString("en-US")} more of ${left.toLocaleString("en-US")}`;
    if (data.tokens.left_out) $("token-readout").textContent = `${asCount(data.tokens.left_out, "token")} of the trace left out of this page.`;
  }

  function stripToken(i) {
    const node = tokenNode(i, tokens.generated[i] ? "given" : "prompt");
    node.dataset.i = i;
    if (tokens.generated[i] && state.heat && !missing(tintOf(i))) {
      const [low, high] = state.heat, heat = Math.min(Math.max((tintOf(i) - low) / (high - low), 0), 1);
      node.style.background = `rgba(${themed("--heat")}, ${(0.06 + 0.8 * heat).toFixed(2)})`;
    }
    return node;
  }

  function markTokens() {
    if (!$("strip")) return;
    for (const node of $("strip").querySelectorAll(".now")) node.classList.remove("now");
    const out = tokensOfStep(state.row).out;
    for (const i of out) {
      const node = $("strip").querySelector(`[data-i="${i}"]`);
      if (!node) continue;
      node.classList.add("now");
      const box = $("strip"), top = node.offsetTop - box.offsetTop;
      if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 30) box.scrollTop = top - 60;
    }
    if (out.length) $("token-readout").textContent = tokenFacts(out[0]);
  }

  // -- the charts -----------------------------------------------------------------------

  const charts = [...document.querySelectorAll("[data-chart]")];
  const stepped = (chart) => !["token-latency", "roofline"].includes(chart.dataset.chart);

  function inked(traces) {
    for (const trace of traces) {
      const name = trace.meta && trace.meta.ink;
      const ink = name && themed(name === "ink" ? "--ink" : `--b-${name}`);
      if (trace.colorbar) trace.colorbar.tickfont = trace.colorbar.title.font = { color: themed("--soft") };
      if (!ink) continue;
      if (trace.marker) trace.marker.color = ink;
      if (trace.marker && trace.marker.line && trace.mode) trace.marker.line.color = themed("--ink");
      if (trace.line) trace.line.color = ink;
      if (trace.fillcolor && trace.stackgroup) trace.fillcolor = ink;
    }
    return traces;
  }

  function dressed(layout, chart) {
    const soft = themed("--soft"), ink = themed("--ink");
    layout.font = { ...layout.font, color: soft };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: themed("--paper"), bordercolor: themed("--line"), font: { color: ink } };
    layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    layout.yaxis.fixedrange = chart.dataset.chart !== "roofline";
    layout.width = undefined;
    if (chart.clientWidth < 500) layout.margin = { ...layout.margin, l: 44, r: 4 };
    // the page has its own legend of the stages, which wraps on a phone
    if (chart.dataset.chart === "timeline") layout.showlegend = false;
    for (const shape of layout.shapes || []) shape.line.color = soft;
    return layout;
  }

  function drawChart(chart) {
    const figure = data.charts[chart.dataset.chart];
    if (!figure.data.length) {
      chart.classList.add("none");
      chart.replaceChildren(make("p", "empty", figure.layout.annotations[0].text));
      return;
    }
    Plotly.newPlot(chart, inked(figure.data), dressed(figure.layout, chart), { displayModeBar: false, responsive: true });
    if (!stepped(chart)) return;
    const marker = make("div", "now");
    chart.append(marker);
    chart.on("plotly_afterplot", () => placeMarker(chart));
    chart.on("plotly_click", (event) => chooseStep(event.points[0].x));
    chart.on("plotly_doubleclick", () => setTimeout(() => frameCall(chart)));
    frameCall(chart);
  }

  /** Show the arithmetic of the next or previous point of the roofline. */
  function walkRoofline(chart, by) {
    const points = chart.data.flatMap((trace, curveNumber) => (trace.customdata || []).map((text, pointNumber) => ({ curveNumber, pointNumber, text })));
    if (!points.length) return;
    state.point = (state.point + by + points.length) % points.length;
    Plotly.Fx.hover(chart, [points[state.point]]);
    $("roofline-readout").textContent = points[state.point].text;
  }

  function placeMarker(chart) {
    const marker = chart.querySelector(".now"), layout = chart._fullLayout;
    if (!marker || !layout || !layout.xaxis) return;
    const x = layout.xaxis.d2p(steps.step[state.row]);
    marker.style.left = `${layout.xaxis._offset + x - 1}px`;
    marker.style.top = `${layout.yaxis._offset}px`;
    marker.style.height = `${layout.yaxis._length}px`;
    marker.hidden = x < 0 || x > layout.xaxis._length;
  }

  /** Put another figure into a chart: time or efficiency of the layers. */
  function swapChart(chart, name) {
    const figure = data.charts[name], empty = !figure.data.length;
    Plotly.react(chart, inked(figure.data), dressed(figure.layout, chart)).then(() => { if (!empty) frameCall(chart); });
  }

  /** Show only the steps of the chosen call; all steps of the trace share the axis. */
  function frameCall(chart) {
    if (!chart._fullLayout || !stepped(chart)) return;
    const { rows } = call(), low = steps.step[rows[0]], high = steps.step[lastRow()];
    const room = data.calls.length > 1 || rows.length < 3 ? [low - 0.5, high + 0.5] : null;
    Plotly.relayout(chart, room ? { "xaxis.range": room } : { "xaxis.autorange": true });
  }

  function retheme() {
    for (const chart of charts) {
      if (!chart._fullLayout) continue;
      Plotly.react(chart, inked(chart.data), dressed(chart.layout, chart));
    }
    drawMap(state.row);
    drawDetail();
  }

  // -- choosing -------------------------------------------------------------------------

  function select(row) {
    const { rows } = call();
    state.row = place(row) < 0 ? rows[0] : row;
    state.zoom = null;
    state.focus = -1;
    $("step").value = place(state.row);
    const name = `${stepName(state.row)} · ${asTime(steps.wall_ns[state.row])}`;
    $("where").textContent = name;
    $("step").setAttribute("aria-valuetext", name);
    $("previous").disabled = state.row === rows[0];
    $("next").disabled = state.row === lastRow();
    drawMap(state.row);
    drawDetail();
    markTokens();
    charts.forEach(placeMarker);
  }

  function stepBy(n) {
    const { rows } = call();
    select(rows[Math.min(Math.max(place(state.row) + n, 0), rows.length - 1)]);
  }

  function chooseStep(step) {
    const row = steps.before ? nearest(step) : steps.step.indexOf(Math.round(step));
    if (row < 0) return;
    const owner = data.calls.findIndex((one) => one.rows.includes(row));
    if (owner >= 0 && owner !== state.call) chooseCall(owner, row);
    else select(row);
  }

  /** The row of the step that is nearest to one that the page may not hold; both come in order. */
  function nearest(step) {
    const after = steps.step.findIndex((one) => one >= step);
    if (after < 0) return steps.step.length - 1;
    return after > 0 && step - steps.step[after - 1] < steps.step[after] - step ? after - 1 : after;
  }

  function chooseCall(index, row) {
    state.call = index;
    $("call").value = index;
    const { rows } = call();
    $("step").max = rows.length - 1;
    $("step").disabled = $("play").disabled = rows.length < 2;
    const sequences = new Set();
    for (let i = 0; i < tokens.call.length; i++) if (tokens.call[i] === call().call) sequences.add(tokens.sequence[i]);
    const list = [...sequences].sort((a, b) => a - b);
    state.sequence = list.includes(state.sequence) ? state.sequence : list[0] || 0;
    $("sequence").replaceChildren(...list.map((n) => option(n, `sequence ${n}`)));
    $("sequence").value = state.sequence;
    $("sequence").hidden = list.length < 2;
    drawStrip();
    charts.forEach(frameCall);
    select(row === undefined ? rows[0] : row);
  }

  function option(value, text) {
    const node = make("option", "", text);
    node.value = value;
    return node;
  }

  function play(on) {
    clearInterval(state.timer);
    state.timer = on ? setInterval(() => {
      if (state.row === lastRow()) play(false);
      else stepBy(1);
    }, 450) : null;
    $("play").textContent = on ? "Pause" : "Play";
    $("play").setAttribute("aria-pressed", String(on));
  }

  function listen() {
    $("call").addEventListener("change", (e) => { play(false); chooseCall(Number(e.target.value)); });
    $("sequence").addEventListener("change", (e) => { state.sequence = Number(e.target.value); drawStrip(); select(state.row); });
    let wanted = null;
    $("step").addEventListener("input", (e) => {
      // a drag fires faster than frames: draw only the newest
      if (wanted === null) requestAnimationFrame(() => { select(call().rows[wanted]); wanted = null; });
      wanted = Number(e.target.value);
    });
    $("previous").addEventListener("click", () => stepBy(-1));
    $("next").addEventListener("click", () => stepBy(1));
    $("play").addEventListener("click", () => {
      if (!state.timer && state.row === lastRow()) select(call().rows[0]);
      play(!state.timer);
    });
    $("detail").addEventListener("click", (e) => zoomTo(spanAt(e)));
    $("detail").addEventListener("mousemove", (e) => {
      const i = spanAt(e);
      if (i !== state.focus && i >= 0) { state.focus = i; drawDetail(); }
    });
    $("detail").addEventListener("keydown", (e) => { if (moveFocus(e.key)) e.preventDefault(); });
    const roofline = document.querySelector("[data-chart=roofline]");
    if (roofline) roofline.addEventListener("keydown", (e) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!by || !roofline.data) return;
      walkRoofline(roofline, by);
      e.preventDefault();
    });
    if ($("heat")) $("heat").addEventListener("change", (e) => swapChart(document.querySelector("[data-chart=heatmap]"), e.target.value));
    if ($("tint")) $("tint").addEventListener("change", (e) => { state.tint = e.target.value; drawStrip(); markTokens(); });
    if ($("strip")) {
      $("strip").addEventListener("click", (e) => {
        const node = e.target.closest("[data-i]");
        if (!node) return;
        const i = Number(node.dataset.i);
        if (tokens.step[i] >= 0) chooseStep(tokens.step[i]);
        $("token-readout").textContent = tokenFacts(i);
      });
      $("strip").addEventListener("mouseover", (e) => {
        const node = e.target.closest("[data-i]");
        if (node) $("token-readout").textContent = tokenFacts(Number(node.dataset.i));
      });
      $("strip").addEventListener("keydown", (e) => {
        if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
          stepBy(e.key === "ArrowRight" ? 1 : -1);
          e.preventDefault();
        }
      });
      $("more").addEventListener("click", moreTokens);
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
    let resizing = 0;
    addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { drawDetail(); }, 120); });
    addEventListener("beforeprint", () => { retheme(); charts.forEach((chart) => chart._fullLayout && Plotly.relayout(chart, { width: Math.min(chart.clientWidth, 700) })); });
    addEventListener("afterprint", () => charts.forEach((chart) => chart._fullLayout && Plotly.relayout(chart, { width: null, autosize: true })));
  }

  $("call").replaceChildren(...data.calls.map((one, i) => option(i, one.label)));
  $("call").hidden = data.calls.length < 2;
  listen();
  chooseCall(0);
  const linked = location.hash.match(/^#step=(\d+)$/);
  if (linked) chooseStep(Number(linked[1]));
  // one chart a task: the page answers while they are drawn
  charts.forEach((chart) => setTimeout(() => drawChart(chart)));
})();
