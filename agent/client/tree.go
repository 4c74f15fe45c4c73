package client

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

// TreeStats says what was moved; see package tree.
type TreeStats = tree.Stats

// PutTree unpacks a tar stream into a directory of the guest, which is made if
// it is not there. Files that exist are replaced, one by one; with owners they
// get the owners, privileged mode bits and devices of the stream, otherwise they
// are root's. After an error the files that came before it are there.
func (c *Client) PutTree(ctx context.Context, dir string, r io.Reader, owners bool) (TreeStats, error) {
	return c.PlaceTree(ctx, Placement{Dir: dir, Owners: owners}, r)
}

// Placement says where a tree is put, and what goes before it.
type Placement struct {
	// Dir and Owners are as for PutTree.
	Dir    string
	Owners bool
	// Vacate are empty directories that are made first, see Client.Vacate.
	Vacate []EmptyDirectory
	// Replace removes first what is in Dir, but for names that one of the patterns Spare
	// matches (path.Match). If Dir is no directory it becomes one.
	Replace bool
	Spare   []string
	// Sum asks for TreeStats.Sum, in the form of tree.Sum.
	Sum bool
}

// PlaceTree is PutTree with more to it, in one request.
func (c *Client) PlaceTree(ctx context.Context, p Placement, r io.Reader) (TreeStats, error) {
	request := proto.PutTreeRequest{
		Path: proto.Text(p.Dir), Owners: p.Owners, Vacate: emptyDirectories(p.Vacate), Replace: p.Replace, Spare: p.Spare, Sum: p.Sum,
	}
	var requires []string
	if p.Vacate != nil || p.Replace || p.Sum {
		requires = surveyor
	}
	var stats TreeStats
	err := c.upload(ctx, proto.OpPutTree, request, p.Dir, r, &stats, requires...)
	return stats, err
}

// GetTree writes what is below a directory of the guest to w as a tar stream
// with relative names. The guest made it: unpack it with care, or use Download.
func (c *Client) GetTree(ctx context.Context, dir string, w io.Writer) (TreeStats, error) {
	return c.getTree(ctx, proto.GetTreeRequest{Path: proto.Text(dir)}, w)
}

// GetExactTree is GetTree, and refuses a link to a directory.
func (c *Client) GetExactTree(ctx context.Context, dir string, w io.Writer) (TreeStats, error) {
	return c.getTree(ctx, proto.GetTreeRequest{Path: proto.Text(dir), Exact: true}, w, surveyor...)
}

func (c *Client) getTree(ctx context.Context, r proto.GetTreeRequest, w io.Writer, requires ...string) (TreeStats, error) {
	var stats TreeStats
	err := c.download(ctx, proto.OpGetTree, r, string(r.Path), w, nil, &stats, requires...)
	return stats, err
}

// Upload copies what is below a directory of the host into one of the guest.
func (c *Client) Upload(ctx context.Context, from *os.Root, dir string, owners bool) (TreeStats, error) {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		_, err := tree.Pack(w, from)
		w.CloseWithError(err)
		packed <- err
	}()
	stats, err := c.PutTree(ctx, dir, r, owners)
	r.CloseWithError(io.ErrClosedPipe) // the guest wants no more
	if packErr := <-packed; err == nil {
		err = packErr
	}
	return stats, err
}

// Download copies what is below a directory of the guest into one of the host.
// Everything becomes the caller's; nothing is written outside of it, whatever
// the guest sends, and no device or privileged program is made.
func (c *Client) Download(ctx context.Context, dir string, to *os.Root) (TreeStats, error) {
	r, w := io.Pipe()
	var stats TreeStats
	unpacked := make(chan error, 1)
	go func() {
		var err error
		stats, err = tree.Unpack(r, to, tree.Options{})
		if err == nil {
			_, err = io.Copy(io.Discard, r) // a stream may be padded
		}
		r.CloseWithError(err)
		unpacked <- err
	}()
	_, err := c.GetTree(ctx, dir, w)
	w.CloseWithError(err)
	if unpackErr := <-unpacked; err == nil {
		err = unpackErr
	}
	return stats, err
}

// Stat describes a file of the guest; a symbolic link is not followed.
func (c *Client) Stat(ctx context.Context, path string) (File, error) {
	f := File{Path: path}
	var info proto.FileInfo
	err := c.simple(ctx, proto.OpStat, proto.PathRequest{Path: proto.Text(path)}, &info)
	if err == nil {
		f.describe(info)
	}
	return f, err
}

// maxListed bounds what a guest can make its host hold: some hundred megabytes at
// worst.
const maxListed = 500_000

// List describes what is in a directory of the guest, in byte order of names.
// The Path of each is its name in the directory. A directory with more than 500,000
// names is an error; a tree of it (GetTree) has no such limit.
func (c *Client) List(ctx context.Context, dir string) ([]File, error) {
	var files []File
	request := proto.ListRequest{Path: proto.Text(dir)}
	for {
		var part proto.ListResult
		if err := c.simple(ctx, proto.OpList, request, &part); err != nil {
			return nil, err
		}
		for _, e := range part.Entries {
			if !isName(e.Name) || e.Name <= request.After {
				return nil, &ConnectionError{Op: proto.OpList, Started: true, Err: &proto.ProtocolError{Reason: "a list of files that is none"}}
			}
			if len(files) == maxListed {
				return nil, fmt.Errorf("list %s in guest: it has more than %d names", dir, maxListed)
			}
			f := File{Path: string(e.Name)}
			f.describe(e.FileInfo)
			files = append(files, f)
			request.After = e.Name
		}
		if !part.More || len(part.Entries) == 0 {
			return files, nil
		}
	}
}

// isName says whether a directory can have such an entry (NAME_MAX in limits.h).
func isName(name proto.Text) bool {
	return name != "" && name != "." && name != ".." && len(name) <= 255 && !strings.ContainsAny(string(name), "/\x00")
}

// Remove takes a file, an empty directory or, if recursive, a tree away.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	return c.change(ctx, proto.OpRemove, proto.RemoveRequest{Path: proto.Text(path), Recursive: recursive})
}

// Move renames a file or directory of the guest within its file system. A file
// under the new name is replaced.
func (c *Client) Move(ctx context.Context, from, to string) error {
	return c.change(ctx, proto.OpMove, proto.MoveRequest{From: proto.Text(from), To: proto.Text(to)})
}

// change is an operation without streams that a guest with another generation
// refuses.
func (c *Client) change(ctx context.Context, op string, params any) error {
	return c.ask(ctx, op, proto.Request{Generation: c.cfg.Generation}, params, &struct{}{})
}
