"""Forecasts of published measurements, and the curves behind them."""
