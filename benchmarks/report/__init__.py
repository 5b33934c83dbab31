"""The accuracy report: tables and figures of docs/accuracy.md from the result files of the studies."""
