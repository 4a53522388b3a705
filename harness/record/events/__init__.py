"""The journal of a run. Each file has one writer. Reading merges the files into one sequence of checked events.

Input: files of several nodes, each with its own clock and process ids. Output: events with one clock and one pid
namespace, and reports of damaged or missing lines."""
