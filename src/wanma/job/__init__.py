"""Job of a run: its file, sections, execution plan and forecast, and the context of its ranks."""
