"use strict";
// The server says when something has changed; the page then fetches itself and replaces what it shows.
const renew = async () => {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const opened = [...document.querySelectorAll("details")].map((part) => part.open);
  const logarithmic = [...document.querySelectorAll(".switch")].map((part) => part.getAttribute("aria-pressed"));
  const isAtEnd = scrollY > 0 && innerHeight + scrollY >= document.body.scrollHeight - 2;
  const checked = new Set([...document.querySelectorAll("input:checked")].map((input) => input.value));
  document.querySelector("main").replaceWith(page.querySelector("main"));
  document.querySelectorAll("main input").forEach((input) => { input.checked = checked.has(input.value); });
  prepareCharts();
  [...document.querySelectorAll("details")].forEach((part, index) => { part.open = opened[index]; });
  [...document.querySelectorAll(".switch")].forEach((part, index) => {
    if (logarithmic[index] === "true") part.click();
  });
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);  // who reads the end of a log stays there
};
const changes = new EventSource(document.querySelector("main").dataset.changes);
let renewing = false, changed = false;
changes.onmessage = async () => {
  changed = true;
  if (renewing) return;
  renewing = true;
  try {
    while (changed && !document.hidden) {
      changed = false;
      await renew();
    }
  } finally {
    renewing = false;
  }
};
document.addEventListener("visibilitychange", () => { if (!document.hidden) renew(); });
