// Package output turns results into what the command line prints: tables for
// people, JSON for programs, names for scripts. Text that a guest wrote is made
// harmless before a terminal sees it.
package output
