package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/snapshot/archive"
	"github.com/forkvm/forkvm/snapshot/store"
)

// exportView is what exporting one snapshot came to.
type exportView struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	To     string `json:"to"`
	// Bytes is what the files hold, zeros included. NewBytes is what was written.
	Bytes     int64 `json:"bytes"`
	Chunks    int   `json:"chunks"`
	NewChunks int   `json:"new_chunks"`
	NewBytes  int64 `json:"new_bytes"`
}

func (a *app) exportVerb() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "export [flags] NAME [FILE|-]",
		Short: "Write a snapshot to one file or a pipe, or into a directory that shares what is equal",
		Example: "  forkvm snapshot export task-1 task-1.forkvm\n" +
			"  forkvm snapshot export task-1 | ssh other forkvm snapshot import\n" +
			"  forkvm snapshot export --to /srv/archive task-1",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return needs("NAME")(cmd, args)
			}
			return upTo("NAME", "FILE")(cmd, args)
		},
	}
	cmd.Flags().StringVar(&dir, "to", "", "add the snapshot to an archive directory")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		name, to := args[0], append(args, "-")[1]
		switch {
		case dir != "" && len(args) > 1:
			return usagef("export: a file and --to exclude each other")
		case dir != "":
			return a.export(n, name, dir, func(advance func(int64)) (archive.Result, error) {
				return n.ArchiveSnapshot(ctx, name, dir, advance)
			})
		case to == "-":
			return a.exportToPipe(ctx, n, name)
		}
		return a.export(n, name, to, func(advance func(int64)) (r archive.Result, err error) {
			err = replaceFile(to, func(f *os.File) error {
				r, err = n.ExportSnapshot(ctx, name, f, advance)
				return err
			})
			return r, err
		})
	})
	a.withQuiet(cmd, "no progress")
	return a.withOutput(cmd)
}

// export exports with progress and prints what came of it.
func (a *app) export(n Node, name, to string, do func(advance func(int64)) (archive.Result, error)) error {
	info, err := n.InspectSnapshot(name)
	if err != nil {
		return err
	}
	var r archive.Result
	err = a.measure("exporting", info.Manifest.LayerBytes(), func(advance func(int64)) error {
		r, err = do(advance)
		return err
	})
	if err != nil {
		return err
	}
	if !a.format.Machine() {
		_, err := fmt.Fprintln(a.Stdout, to)
		return err
	}
	return output.WriteObject(a.Stdout, a.format, exportView{
		Schema: "forkvm/export/v1", Name: name, To: to,
		Bytes: r.Bytes, Chunks: r.Chunks, NewChunks: r.NewChunks, NewBytes: r.NewBytes,
	})
}

func (a *app) exportToPipe(ctx context.Context, n Node, name string) error {
	if a.StdoutTerminal {
		return usagef("export: standard output is a terminal: name a file, or send it into a pipe")
	}
	_, err := n.ExportSnapshot(ctx, name, a.Stdout, nil)
	return err
}

// replaceFile makes a file that is complete or not there under its name.
func replaceFile(path string, write func(f *os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return failure.As(failure.Internal, err)
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

func (a *app) importVerb() *cobra.Command {
	var dir, as string
	cmd := &cobra.Command{
		Use:   "import [flags] [FILE|-|NAME]",
		Short: "Make a snapshot of an exported one; an import that was cut off goes on",
		Example: "  forkvm snapshot import task-1.forkvm\n" +
			"  forkvm snapshot import --from /srv/archive task-1",
		Args: upTo("FILE"),
	}
	cmd.Flags().StringVar(&dir, "from", "", "take the snapshot NAME from an archive directory")
	cmd.Flags().StringVar(&as, "name", "", "what it is called here; the name that it had if empty")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if dir != "" && len(args) == 0 {
			return usagef("import --from needs the NAME of a snapshot in the directory")
		}
		var info store.Info
		err := a.spin("importing", func() (err error) {
			if dir != "" {
				info, err = n.UnarchiveSnapshot(ctx, dir, args[0], as, nil)
				return err
			}
			return a.openInput(append(args, "-")[0], func(r io.Reader) error {
				info, err = n.ImportSnapshot(ctx, r, as, nil)
				return err
			})
		})
		if err != nil {
			return err
		}
		if !a.format.Machine() {
			_, err := fmt.Fprintln(a.Stdout, info.Name)
			return err
		}
		return output.WriteObject(a.Stdout, a.format, viewOfSnapshot(info))
	})
	a.withQuiet(cmd, "no progress")
	return a.withOutput(cmd)
}

// openInput opens a file, or standard input for "-".
func (a *app) openInput(path string, use func(r io.Reader) error) error {
	if path == "-" {
		return use(a.Stdin)
	}
	f, err := os.Open(path)
	if err != nil {
		return failure.New(failure.InvalidArgument, "%w", err)
	}
	defer f.Close()
	return use(f)
}
