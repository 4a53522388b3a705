"""The journal of a run: one writer for each file, and on reading one sequence of checked events.

Files of several nodes come in, with their own clocks and process ids. Events of one clock and one pid namespace go out;
what is damaged or missing is said."""
