package org.apache.hadoop.shaded.org.glassfish.jersey.internal;

import org.apache.hadoop.shaded.javax.ws.rs.core.*;
import org.apache.hadoop.shaded.javax.ws.rs.ext.RuntimeDelegate;

/** Media types from and to text, which the shaded client lacks. WebHdfsFileSystem uses nothing else of JAX-RS. */
public class RuntimeDelegateImpl extends RuntimeDelegate {
    @Override public UriBuilder createUriBuilder() { throw new UnsupportedOperationException(); }
    @Override public Response.ResponseBuilder createResponseBuilder() { throw new UnsupportedOperationException(); }
    @Override public Variant.VariantListBuilder createVariantListBuilder() { throw new UnsupportedOperationException(); }
    @Override public Link.Builder createLinkBuilder() { throw new UnsupportedOperationException(); }
    @Override public <T> T createEndpoint(Application a, Class<T> t) { throw new UnsupportedOperationException(); }
    @SuppressWarnings("unchecked")
    @Override public <T> HeaderDelegate<T> createHeaderDelegate(Class<T> type) {
        return (HeaderDelegate<T>) new HeaderDelegate<MediaType>() {
            @Override public MediaType fromString(String text) {
                String[] parts = text.split(";")[0].trim().split("/");
                return new MediaType(parts[0], parts[1]);
            }
            @Override public String toString(MediaType type) { return type.getType() + "/" + type.getSubtype(); }
        };
    }
}
