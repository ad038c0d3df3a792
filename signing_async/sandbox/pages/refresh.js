// Keep a page up to date: load it again every two seconds and replace the live cards that have changed.
// A card with the focus or with selected text is left alone, as are hidden pages. Pages work without this script.
"use strict";

async function refresh() {
  const cards = document.querySelectorAll(".live");
  if (document.hidden || !cards.length || !getSelection().isCollapsed) return;
  const response = await fetch(location.href, { headers: { "X-Refresh": "1" } });
  if (!response.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const card of cards) {
    const fresh = page.getElementById(card.id);
    if (!fresh || card.contains(document.activeElement) || fresh.innerHTML === card.innerHTML) continue;
    card.replaceChildren(...fresh.childNodes);
  }
}

// On a narrow screen the navigation scrolls sideways.
document.querySelector(".top nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });

setInterval(() => refresh().catch(() => {}), 2000); // a sandbox that was stopped is not an error
