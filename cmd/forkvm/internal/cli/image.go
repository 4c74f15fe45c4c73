package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/guest/initramfs"
	"github.com/forkvm/forkvm/internal/failure"
)

func (a *app) imageVerbs() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Build, list and remove images",
		Args:  cobra.ArbitraryArgs,
		RunE:  groupHelp,
	}
	cmd.AddCommand(a.imageBuildVerb(), a.imageListVerb(), a.imageRemoveVerb())
	return cmd
}

// imageView is an image as the command line lists it.
type imageView struct {
	Schema        string         `json:"schema"`
	Name          string         `json:"name"`
	ID            string         `json:"id"`
	Created       time.Time      `json:"created,omitzero"`
	KernelRelease string         `json:"kernel_release"`
	Mode          string         `json:"mode"`
	SizeBytes     int64          `json:"size_bytes"`
	Error         *failure.Error `json:"error,omitempty"`
}

const imageSchema = "forkvm/image-summary/v1"

func viewOfImage(i Image) imageView {
	v := imageView{
		Schema: imageSchema, Name: i.Name, ID: i.Manifest.ID, Created: i.Manifest.CreatedAt.UTC(),
		KernelRelease: i.Manifest.KernelRelease, Mode: i.Manifest.Mode,
	}
	for _, f := range i.Manifest.Files {
		v.SizeBytes += f.Size
	}
	if i.Err != nil {
		v.Error = explain(i.Err)
	}
	return v
}

func (a *app) imageBuildVerb() *cobra.Command {
	var c image.Config
	var size output.Bytes
	c.Agent = a.GuestAgent
	cmd := &cobra.Command{
		Use:   "build [flags] NAME",
		Short: "Make an image from a kernel and a root file system",
		Long: "Make an image from a kernel (a Debian package, a bzImage or ELF file, or a tree\n" +
			"with boot/ and lib/modules/) and a root file system (a directory or a tar archive,\n" +
			"compressed or not). No privileges are needed.",
		Example: "  forkvm image build debian --kernel linux-image-6.12_amd64.deb --rootfs debian.tar",
		Args:    needs("NAME"),
	}
	f := cmd.Flags()
	f.StringVar(&c.Kernel, "kernel", "", "the kernel")
	f.StringVar(&c.Rootfs, "rootfs", "", "the root file system; without one the initramfs is all there is")
	f.Var(&size, "size", "size of the root file system; 0: what it holds and some room")
	f.StringVar(&c.Mode, "mode", "", "who is the first process: "+initramfs.ModeHandover+" (the distribution's init) or "+initramfs.ModePID1+" (the guest agent); default: as the root file system has an init or not")
	f.StringVar(&c.ExtraCommandLine, "kernel-args", "", "added to the kernel's command line")
	f.StringVar(&c.Hostname, "hostname", "", "hostname until a VM's name is given")
	f.StringVar(&c.Agent, "guest-agent", c.Agent, "the guest agent's program")
	cmd.MarkFlagRequired("kernel")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		c.Size = int64(size)
		var made Image
		err := a.spin("building image "+args[0], func() (err error) {
			made, err = n.BuildImage(ctx, args[0], c)
			return err
		})
		if err != nil {
			return err
		}
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, viewOfImage(made))
		}
		_, err = fmt.Fprintln(a.Stdout, args[0])
		return err
	})
	a.withQuiet(cmd, "no progress")
	return a.withOutput(cmd)
}

func (a *app) imageListVerb() *cobra.Command {
	return namesVerb(a, "List images", Node.Images, viewOfImage, a.imageList)
}

func (a *app) imageList(views []imageView) output.List[imageView] {
	now := a.Now()
	return output.List[imageView]{
		Header: []string{"NAME", "KERNEL", "MODE", "SIZE", "CREATED"},
		Row: func(v imageView) []string {
			if v.Error != nil {
				return []string{v.Name, "", "", "", string(v.Error.Code)}
			}
			return []string{v.Name, v.KernelRelease, v.Mode, output.Size(v.SizeBytes), output.Age(now.Sub(v.Created))}
		},
		Name:  func(v imageView) string { return v.Name },
		Items: views,
	}
}

func (a *app) imageRemoveVerb() *cobra.Command {
	return a.namedVerb("rm NAME...", "Remove images; VMs and snapshots made from them go on",
		func(_ context.Context, n Node, name string) error { return n.RemoveImage(name) })
}
