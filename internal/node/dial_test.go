package node

import (
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
)

// The VM's socket gets the port and the request at once, and what follows its answer
// is the guest's, however it is cut.
func TestDialGuest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, test := range []struct {
		name    string
		answers []string
		want    string
		failure string
	}{
		{"at once", []string{"OK 1073741824\nhello"}, "hello", ""},
		{"in parts", []string{"O", "K 1", "\nhel", "lo"}, "hello", ""},
		{"nobody listens", nil, "", "refused"},
		{"another socket", []string{"SSH-2.0\n"}, "", "unexpected answer"},
		{"endless", []string{strings.Repeat("OK", 100)}, "", "unexpected answer"},
	} {
		t.Run(test.name, func(t *testing.T) {
			asked := make(chan string, 1)
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				b := make([]byte, 100)
				n, _ := conn.Read(b)
				asked <- string(b[:n])
				for _, part := range test.answers {
					io.WriteString(conn, part)
				}
			}()
			conn, err := dialGuest(t.Context(), path, 1024)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if n, err := io.WriteString(conn, "request"); err != nil || n != len("request") {
				t.Errorf("%d bytes, %v", n, err)
			}
			if got := <-asked; got != "CONNECT 1024\nrequest" {
				t.Errorf("asked %q", got)
			}
			got, err := io.ReadAll(conn)
			if string(got) != test.want || (err == nil) != (test.failure == "") || err != nil && !strings.Contains(err.Error(), test.failure) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}
