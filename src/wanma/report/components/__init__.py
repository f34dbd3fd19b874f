"""Components of HTML pages: document, cards, tables, and charts as SVG."""
