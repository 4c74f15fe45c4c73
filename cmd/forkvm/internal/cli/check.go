package cli

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/snapshot/store"
)

// checkView is what checking one snapshot came to.
type checkView struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	Sound  bool   `json:"sound"`
	// CheckedBytes is what its files hold, those that were read for another
	// snapshot before included.
	CheckedBytes int64          `json:"checked_bytes"`
	Error        *failure.Error `json:"error,omitempty"`
}

func (a *app) snapshotCheckVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [flags] [NAME...]",
		Short: "Read snapshots and compare them with their checksums; all of them if none is named",
		Args:  cobra.ArbitraryArgs,
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, names []string) error {
		names, total, err := checkList(n, names)
		if err != nil {
			return err
		}
		var failed error
		results := checkResults()
		err = a.measure("checking", total, func(advance func(int64)) error {
			verification := new(store.Verification)
			failed = a.eachUnlessMachine(names, func(name string) error {
				v := checkView{Schema: "forkvm/check/v1", Name: name}
				verification.Progress = func(bytes int64) {
					v.CheckedBytes += bytes
					advance(bytes)
				}
				err := n.CheckSnapshot(ctx, name, verification)
				if v.Sound = err == nil; !v.Sound {
					v.Error = explain(err)
				}
				results.Items = append(results.Items, v)
				return err
			})
			return context.Cause(ctx)
		})
		if err != nil {
			return err
		}
		return errors.Join(results.Write(a.Stdout, a.format), failed)
	})
	a.withQuiet(cmd, "no progress")
	return a.withOutput(cmd)
}

func checkResults() output.List[checkView] {
	return output.List[checkView]{
		Header: []string{"NAME", "CHECKED", "RESULT"},
		Row: func(v checkView) []string {
			result := "sound"
			if v.Error != nil {
				result = string(v.Error.Code)
			}
			return []string{v.Name, output.Size(v.CheckedBytes), result}
		},
		Name: func(v checkView) string { return v.Name },
	}
}

// checkList is what is to be checked, all if nothing is named, and how much data
// that is.
func checkList(n Node, names []string) ([]string, int64, error) {
	all, err := n.Snapshots()
	if err != nil {
		return nil, 0, err
	}
	everything := len(names) == 0
	var total int64
	for _, s := range all {
		if everything {
			names = append(names, s.Name)
		}
		if s.Manifest != nil && slices.Contains(names, s.Name) {
			total += s.Manifest.LayerBytes()
		}
	}
	return names, total, nil
}
