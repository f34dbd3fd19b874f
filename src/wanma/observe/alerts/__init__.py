"""Alerts: rules over the catalogue of metrics, evaluated here and by Prometheus alike, and their sinks."""
