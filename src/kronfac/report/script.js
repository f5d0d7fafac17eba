"use strict";
// Everything is readable without this: it adds values under the pointer, hiding of lines, the choice of
// the axis, and light or dark by hand.
(() => {
  const root = document.documentElement;
  const all = (what, inside = document) => [...inside.querySelectorAll(what)];
  document.body.classList.add("scripted");

  const remembered = (key, value) => {
    try {
      if (value === undefined) return localStorage.getItem(key);
      localStorage.setItem(key, value);
    } catch { /* pages without storage forget */ }
    return null;
  };

  const theme = document.getElementById("theme");
  theme.hidden = false;
  const chosen = remembered("kronfac-theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  theme.addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    remembered("kronfac-theme", root.dataset.theme);
  });

  const press = (button, on) => button.setAttribute("aria-pressed", String(on));

  for (const article of all("article")) {
    const choose = (axes) => {
      article.dataset.axes = axes;
      for (const button of all("[data-axes]", article)) press(button, button.dataset.axes === axes);
    };
    for (const button of all("button[data-axes]", article)) {
      button.addEventListener("click", () => choose(button.dataset.axes));
    }
    choose(innerWidth < 900 ? "steps" : "both");

    const hidden = new Set();
    for (const key of all("[data-toggle]", article)) {
      key.addEventListener("click", () => {
        const series = key.dataset.toggle;
        if (!hidden.delete(series)) hidden.add(series);
        press(key, !hidden.has(series));
        for (const line of all(`[data-series="${series}"]`, article)) {
          line.classList.toggle("off", hidden.has(series));
        }
      });
    }
    const keys = all("[data-toggle]", article);
    for (const plot of all(".plot", article)) watch(plot, keys, hidden);
  }

  // Nearest point of a line, by its place along the axis.
  function nearest(points, place) {
    let best = points[0];
    for (const point of points) {
      if (Math.abs(point[0] - place) < Math.abs(best[0] - place)) best = point;
    }
    return best;
  }

  function make(name, parent, text) {
    const element = document.createElement(name.split(".")[0]);
    element.className = name.split(".")[1] || "";
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function watch(plot, keys, hidden) {
    const area = plot.querySelector(".area");
    const { axis, curves } = JSON.parse(plot.querySelector(".values").textContent);
    let shown = [];
    let place = 0;

    const clear = () => { for (const element of shown) element.remove(); shown = []; };
    const show = (at) => {
      clear();
      place = Math.min(1, Math.max(0, at));
      const seen = curves.filter((c) => c.points.length && !hidden.has(String(c.series)));
      if (!seen.length) return;
      const cursor = make("div.cursor", area);
      cursor.style.left = `${100 * place}%`;
      const tip = make("div.tip", area);
      tip.setAttribute("role", "status");
      shown.push(cursor, tip);
      for (const curve of seen) {
        const [x, y, where, value] = nearest(curve.points, place);
        const key = keys[curve.series];
        const spot = make("div.spot", area);
        spot.style.cssText = `${key.getAttribute("style")};left:${100 * x}%;bottom:${100 * y}%`;
        spot.style.margin = "0 0 -6px -6px";
        const row = make("div", tip);
        make("i.dot", row).style.cssText = key.getAttribute("style");
        make("span", row, key.textContent.trim());
        make("b", row, value);
        make("small", row, axis === "steps" ? `step ${where}` : where);
        shown.push(spot);
      }
      const width = area.clientWidth;
      // On a phone it would cover the lines, so it goes below them.
      if (width < 420) {
        tip.style.cssText = "top:calc(100% + 2rem);left:0";
        return;
      }
      const beside = place * width > width / 2 ? place * width - tip.offsetWidth - 12 : place * width + 12;
      tip.style.left = `${Math.min(width - tip.offsetWidth, Math.max(-40, beside))}px`;
    };

    const follow = (event) => {
      const frame = area.getBoundingClientRect();
      show((event.clientX - frame.left) / frame.width);
    };
    area.addEventListener("pointermove", follow);
    area.addEventListener("pointerdown", follow);
    area.addEventListener("pointerleave", clear);
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") clear();
      const move = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
      if (!move) return;
      event.preventDefault();
      show(place + move);
    });
  }

  // Paper cannot be clicked: show everything that is folded or hidden.
  addEventListener("beforeprint", () => {
    for (const folded of all("details:not([open])")) folded.open = true;
    for (const article of all("article")) article.dataset.axes = "both";
  });
})();
