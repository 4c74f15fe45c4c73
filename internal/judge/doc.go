// Package judge decides what a rollout is worth.
//
// A verdict is typed: only one kind of outcome has a number, and everything else says
// whose fault it is: the policy's, the verifier's, or the machine's. Nothing in here
// makes machines or knows what they are; it asks for copies of the rollout and for
// clean ones (Machines), and talks to the guest agents in them (Guest).
//
// The way of a verdict, with both ways of judging side by side:
//
//	fork ─────── quiesce, compare ──┬──── vacate, put tests, check, run, quiesce, read
//	                                │ artifacts
//	clean machine ─ survey ─────────┴──── vacate, put tests, check, run, quiesce, read
//
// What comes from a fork is the policy's word until its processes are gone, and data
// that nobody trusts afterwards. docs/rewards.md says what that is worth.
package judge
