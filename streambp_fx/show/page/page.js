"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas");
  const cursor = document.getElementById("cursor");
  const tooltip = document.getElementById("tooltip");
  const slider = document.getElementById("moment");
  const reading = document.getElementById("reading");

  // The same words as `readable` in streambp_fx/show/step_memory.py.
  function readable(count) {
    if (count < 1024) return `${count} B`;
    for (const unit of ["KiB", "MiB"]) {
      count /= 1024;
      if (count < 1024) return `${count.toFixed(1)} ${unit}`;
    }
    return (count / 1024).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) + " GiB";
  }

  function where(index) {
    const chunk = data.chunk[index] === null ? "" : `, chunk ${data.chunk[index]}`;
    const program = data.program[index] === null ? "" : ` (${data.program[index]})`;
    return `${data.phase[index]}, segment ${data.segment[index]}${chunk}${program}`;
  }

  function row(table, name, bytes, style) {
    const line = table.insertRow();
    const head = line.insertCell();
    if (style) {
      const swatch = document.createElement("span");
      swatch.className = `swatch ${style}`;
      head.append(swatch);
    }
    head.append(name);
    const cell = line.insertCell();
    cell.className = "number";
    cell.dataset.cause = name;
    cell.dataset.bytes = bytes;
    cell.textContent = readable(bytes);
  }

  function show(index) {
    const bytes = data.bytes[index];
    const total = bytes.reduce((sum, one) => sum + one, 0);
    const table = document.createElement("table");
    for (let k = data.causes.length - 1; k >= 0; k--) {
      if (bytes[k]) row(table, data.causes[k], bytes[k], data.classes[k]);
    }
    row(table, "total", total, null);
    tooltip.replaceChildren(where(index), table);
    tooltip.dataset.moment = index;
    const end = index + 1 < data.start.length ? data.start[index + 1] : 1;
    const middle = (data.start[index] + end) / 2;
    cursor.style.left = `${100 * middle}%`;
    tooltip.hidden = false;
    const room = canvas.clientWidth - tooltip.offsetWidth;
    const right = middle * canvas.clientWidth + 12;
    const left = right <= room ? right : middle * canvas.clientWidth - tooltip.offsetWidth - 12;
    tooltip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    slider.value = Math.round(slider.max * middle);
    slider.dataset.moment = index;
    const text = `${where(index)}: ${readable(total)}`;
    slider.setAttribute("aria-valuetext", text);
    reading.textContent = text;
  }

  function hide() {
    tooltip.hidden = true;
  }

  // The moment whose step is under a place on the axis, from 0 to 1.
  function at(place) {
    let low = 0, high = data.start.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.start[middle] <= place) low = middle; else high = middle - 1;
    }
    return low;
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    show(at(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))));
  }

  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  document.addEventListener("pointerdown", (event) => {
    if (!canvas.contains(event.target) && event.target !== slider) hide();
  });
  // The slider stands below the moment it shows: its places are those of the axis. Keys go from moment to moment.
  slider.addEventListener("input", () => show(at(slider.value / slider.max)));
  slider.addEventListener("keydown", (event) => {
    const now = Number(slider.dataset.moment), last = data.start.length - 1;
    const there = {
      ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1,
      PageUp: now + Math.ceil(last / 10), PageDown: now - Math.ceil(last / 10), Home: 0, End: last,
    }[event.key];
    if (there === undefined) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, there)));
  });
  slider.addEventListener("blur", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // A link to a segment opens it.
  function open() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", open);
  open();

  // On paper the segments are open; their programs are not.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details[data-print]:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });
})();
