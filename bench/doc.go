// Package bench measures forkvm end to end: with a real guest, each VM in its own
// process, all devices present and nothing switched off. docs/benchmark.md says
// what each row includes.
//
// Everything goes through package node, as the command line does. Run it in the
// lab in counted time (make bench), where a figure depends on the code alone.
package bench
