"use strict";
(() => {
  const root = document.documentElement;

  // ---- light and dark ----
  const theme = document.querySelector("#theme");
  const show = (name) => {
    root.dataset.theme = name;
    theme.textContent = name === "dark" ? "Light" : "Dark";
  };
  show(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  theme.addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));

  // ---- folding ----
  const every = document.querySelector("#fold");
  const folds = () => [...document.querySelectorAll("details")];
  every.addEventListener("click", () => {
    const open = folds().some((each) => !each.open);
    for (const each of folds()) each.open = open;
    every.textContent = open ? "Fold all" : "Unfold all";
  });
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details.kernel")) each.open = true;
  });

  // ---- links to lines: what holds the line unfolds ----
  const reveal = () => {
    const line = location.hash && document.getElementById(location.hash.slice(1));
    if (!line) return;
    for (let inside = line.closest("details"); inside; inside = inside.parentElement.closest("details")) inside.open = true;
    for (const each of document.querySelectorAll(".here")) each.classList.remove("here");
    line.classList.add("here");
    line.scrollIntoView({ block: line.classList.contains("line") ? "center" : "start" });
  };
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    const to = link && (link.getAttribute("href") || "");
    if (to && to.startsWith("#") && to === location.hash) reveal();
  });

  // ---- maps of tiles ----
  const CLASSES = ["empty", "partial", "full"];
  const ticks = (from, to, most) => {
    let step = 1;
    while ((to - from) / step > most) step *= 2;
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  };
  const unpacked = (text) => text.split(";").map((row) =>
    row.split(",").filter(Boolean).flatMap((run) => {
      const [kind, count] = run.split("*").map(Number);
      return Array(count).fill(kind);
    }));

  for (const map of document.querySelectorAll(".tiles")) {
    const { q: lenQ, k: lenK, tileQ, tileK } = Object.fromEntries(
      Object.entries(map.dataset).map(([name, value]) => [name, Number(value)]));
    const frame = map.querySelector(".frame"), said = map.querySelector(".said");
    const views = [...map.querySelectorAll(".place")];
    const classes = views.map((view) => unpacked(view.dataset.classes));
    let chosen = 0, box = { q: 0, k: 0, zoom: 1 }, at = null;
    const rows = map.querySelector(".rows"), across = map.querySelector(".across");

    const draw = () => {
      const height = lenQ / box.zoom, width = lenK / box.zoom;
      box.q = Math.min(Math.max(box.q, 0), lenQ - height);
      box.k = Math.min(Math.max(box.k, 0), lenK - width);
      views.forEach((view, number) => {
        view.hidden = number !== chosen;
        view.querySelector("svg").setAttribute("viewBox", `${box.k} ${box.q} ${width} ${height}`);
      });
      const place = (position, least, size) => `${(100 * (position - least)) / size}%`;
      rows.replaceChildren(...ticks(box.q, box.q + height, 8).map((tick) => {
        const word = document.createElement("span");
        word.textContent = tick;
        word.style.top = place(tick, box.q, height);
        return word;
      }));
      across.replaceChildren(...ticks(box.k, box.k + width, 8).map((tick) => {
        const word = document.createElement("span");
        word.textContent = tick;
        word.style.left = place(tick, box.k, width);
        return word;
      }), Object.assign(document.createElement("b"), { textContent: "key →" }));
      // Lines between tiles, where these are large enough to tell them apart.
      const each = { k: (frame.clientWidth * tileK) / width, q: (frame.clientHeight * tileQ) / height };
      const lines = {
        "--lines": Math.min(each.k, each.q) >= 6 ? 1 : 0, "--across": `${each.k}px`, "--down": `${each.q}px`,
        "--left": `${(-box.k / tileK) * each.k}px`, "--top": `${(-box.q / tileQ) * each.q}px`,
      };
      for (const [name, value] of Object.entries(lines)) frame.style.setProperty(name, value);
      map.dataset.zoom = box.zoom;
    };
    const zoom = (factor, centre) => {
      const to = Math.min(Math.max(box.zoom * factor, 1), Math.max(lenQ / tileQ, lenK / tileK, 1));
      const middle = centre || { q: box.q + lenQ / box.zoom / 2, k: box.k + lenK / box.zoom / 2 };
      const share = { q: (middle.q - box.q) / (lenQ / box.zoom), k: (middle.k - box.k) / (lenK / box.zoom) };
      box = { zoom: to, q: middle.q - share.q * (lenQ / to), k: middle.k - share.k * (lenK / to) };
      draw();
    };
    const move = (q, k) => {
      box.q += (q * lenQ) / box.zoom / 4;
      box.k += (k * lenK) / box.zoom / 4;
      draw();
    };
    const under = (event) => {
      const bounds = frame.getBoundingClientRect();
      return {
        q: box.q + ((event.clientY - bounds.top) / bounds.height) * (lenQ / box.zoom),
        k: box.k + ((event.clientX - bounds.left) / bounds.width) * (lenK / box.zoom),
      };
    };
    const tell = (point) => {
      const row = Math.floor(point.q / tileQ), column = Math.floor(point.k / tileK);
      const kind = (classes[chosen][row] || [])[column];
      if (kind === undefined) return;
      said.textContent = `tile ${row},${column}, ${CLASSES[kind]}: queries ${row * tileQ} to ` +
        `${Math.min((row + 1) * tileQ, lenQ) - 1}, keys ${column * tileK} to ${Math.min((column + 1) * tileK, lenK) - 1}`;
    };
    const elements = views.map((view) => JSON.parse(view.dataset.elements));
    const canvas = map.querySelector("canvas.tile");
    // The elements of a mixed tile; of another one there is nothing to see.
    const open = (point) => {
      const row = Math.floor(point.q / tileQ), column = Math.floor(point.k / tileK);
      const { patterns, tiles } = elements[chosen], number = tiles[`${row},${column}`];
      tell(point);
      canvas.hidden = number === undefined;
      if (canvas.hidden) return;
      const bytes = Uint8Array.from(atob(patterns[number]), (character) => character.charCodeAt(0));
      canvas.width = tileK;
      canvas.height = tileQ;
      canvas.style.width = `${Math.min(320, tileK * Math.max(1, Math.floor(320 / Math.max(tileQ, tileK))))}px`;
      const context = canvas.getContext("2d"), image = context.createImageData(tileK, tileQ);
      const colours = ["--empty", "--full"].map((name) => getComputedStyle(root).getPropertyValue(name).trim());
      const parts = colours.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
      let kept = 0;
      for (let at = 0; at < tileQ * tileK; ++at) {
        const bit = (bytes[at >> 3] >> (7 - (at & 7))) & 1;
        kept += bit;
        image.data.set([...parts[bit], 255], 4 * at);
      }
      context.putImageData(image, 0, 0);
      const words = `; the mask keeps ${((100 * kept) / (tileQ * tileK)).toFixed(1)}% of its elements`;
      said.textContent += words;
      canvas.setAttribute("aria-label", said.textContent);
    };
    frame.addEventListener("click", (event) => open(under(event)));
    frame.addEventListener("pointermove", (event) => {
      const point = under(event);
      if (at && event.buttons) {
        box.q += at.q - point.q;
        box.k += at.k - point.k;
        draw();
      }
      tell(point);
    });
    frame.addEventListener("pointerdown", (event) => { at = under(event); });
    addEventListener("pointerup", () => { at = null; });
    frame.addEventListener("wheel", (event) => {
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, under(event));
    }, { passive: false });
    const keys = {
      "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), "0": () => zoom(1e-9),
      ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1),
    };
    frame.addEventListener("keydown", (event) => {
      if (event.key === "Enter") open({ q: box.q + lenQ / box.zoom / 2, k: box.k + lenK / box.zoom / 2 });
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
      tell({ q: box.q + lenQ / box.zoom / 2, k: box.k + lenK / box.zoom / 2 });
    });
    for (const button of map.querySelectorAll("button[data-zoom]")) {
      button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
    }
    const select = map.querySelector("select");
    if (select) {
      select.addEventListener("change", () => {
        chosen = Number(select.value);
        said.textContent = views[chosen].dataset.summary;
        canvas.hidden = true;
        draw();
      });
    }
    draw();
    addEventListener("resize", draw);
  }
  reveal();
})();
