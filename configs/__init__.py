"""Every knob of a run, and the YAML files. Importable without torch."""
