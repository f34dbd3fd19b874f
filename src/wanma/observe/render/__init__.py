"""Files for Prometheus and Grafana, made from the catalogue of metrics and the rules of alerts."""
