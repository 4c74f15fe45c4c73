// Package cli is forkvm's command line: the tree of verbs, their flags, what they
// print and the exit codes they end with. docs/cli.md describes it for users.
//
// The tree is built over an Environment, which has everything that a verb
// touches: streams, time, variables, and the Node with the VMs. Nothing here
// reads a global, so a test runs a whole command in its own process.
package cli
