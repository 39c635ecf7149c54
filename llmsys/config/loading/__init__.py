"""From YAML files and command lines to a validated config, with the origin of each value."""
