"""The flow: configuration, observers, quantizer, prepare and convert, report, command line."""
