// Package journal keeps what was done to a rollout: a file of JSON lines to which
// any number of processes append, and the outputs that the lines speak of.
//
//	<rollout>/journal.jsonl
//	<rollout>/kept/<sha256>   contents too long for a line
//
// Each line ends with the SHA-256 of itself and has that of the line before, so
// that a line that was changed, removed, added or moved is found by whoever reads
// the journal (Reader). What no chain shows is that lines are missing at its end;
// who wants to know that keeps a Head elsewhere.
//
// A line is written at once, under a lock. What a crash or a full disk leaves of a
// line is no line: readers say how much it is, and the next Append takes it away
// and notes that it did.
package journal
