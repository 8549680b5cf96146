"""Pictures of the chart's dashboards: a recorded run, and each panel drawn from it with Grafana's own components."""
