"use strict";
// The page reads without this script; it adds what the pointer shows, and the logarithmic axes.
const prepareCharts = () => {
  for (const figure of document.querySelectorAll(".chart")) {
    const points = JSON.parse(figure.querySelector("script").textContent);
    const drawings = [...figure.querySelectorAll("svg")];
    const button = figure.querySelector(".switch");
    if (button) {
      button.hidden = false;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const logarithmic = button.getAttribute("aria-pressed") === "false";
        button.setAttribute("aria-pressed", String(logarithmic));
        for (const drawing of drawings) {
          drawing.toggleAttribute("hidden", (drawing.dataset.kind === "log") !== logarithmic);
        }
      });
    }
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    for (const drawing of drawings) {
      const cursor = drawing.querySelector(".cursor");
      const view = drawing.viewBox.baseVal;
      drawing.addEventListener("pointermove", (event) => {
        const box = drawing.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * view.width;
        const nearest = points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
        cursor.setAttribute("d", `M${nearest[0]} 10V${view.height - 28}`);
        tip.textContent = nearest.slice(1).join("\n");
        tip.hidden = false;
        const outer = figure.getBoundingClientRect();
        const x = box.left - outer.left + (nearest[0] / view.width) * box.width;
        const left = x + 14 + tip.offsetWidth > outer.width ? x - 14 - tip.offsetWidth : x + 14;
        tip.style.left = `${Math.max(left, 0)}px`;
        tip.style.top = `${event.clientY - outer.top + 12}px`;
      });
      drawing.addEventListener("pointerleave", () => {
        tip.hidden = true;
        cursor.setAttribute("d", "");
      });
    }
  }
};
prepareCharts();
