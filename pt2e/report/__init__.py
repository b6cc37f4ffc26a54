"""The content and the losses of a prepared or converted model: reports, statistics, suggestions."""
