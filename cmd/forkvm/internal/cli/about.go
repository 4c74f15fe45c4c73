package cli

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/doctor"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/settings"
)

func (a *app) doctorVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say whether VMs can run here, and what to do if not",
		Args:  needs(),
	}
	cmd.RunE = a.body(func(ctx context.Context, _ []string) error {
		s, err := settings.Resolve(a.directories, a.User)
		if err != nil {
			return err
		}
		report := a.Examine(ctx, doctor.Config{DataDir: s.DataDir, RunDir: s.RunDir, OpenNode: func() error {
			_, err := a.OpenNode(s)
			return err
		}})
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := a.showReport(report); err != nil || report.Usable {
			return err
		}
		return exitCode(exitFailure)
	})
	return a.withOutput(cmd)
}

func (a *app) showReport(r doctor.Report) error {
	if a.format.Machine() {
		return output.WriteObject(a.Stdout, a.format, r)
	}
	t := tabwriter.NewWriter(a.Stdout, 0, 0, 3, ' ', 0)
	for _, c := range r.Checks {
		fmt.Fprintf(t, "%s\t%s\t%s\n", strings.ToUpper(string(c.Status)), c.Name, output.Visible(c.Detail))
		if c.Fix != "" {
			fmt.Fprintf(t, "\t\t→ %s\n", c.Fix)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := "VMs can run here."
	if !r.Usable {
		verdict = "VMs cannot run here."
	}
	_, err := fmt.Fprintln(a.Stdout, verdict)
	return err
}

// versionView is the JSON form of version.
type versionView struct {
	Schema    string `json:"schema"`
	Version   string `json:"version"`
	GoVersion string `json:"go_version"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
}

func (a *app) versionVerb() *cobra.Command {
	cmd := &cobra.Command{Use: "version", Short: "Print the version", Args: needs()}
	cmd.RunE = a.body(func(context.Context, []string) error {
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, versionView{
				Schema: "forkvm/version/v1", Version: a.Version, GoVersion: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
			})
		}
		_, err := fmt.Fprintf(a.Stdout, "forkvm %s\n", a.Version)
		return err
	})
	return a.withOutput(cmd)
}
